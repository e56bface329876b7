"""Host memory: its use by this process and this machine, blocks that malloc keeps, and control of the garbage collector.

A full collection of the garbage collector stops all threads, for 0.15 s with the objects of thousands of responses.
"""

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_GIB = 1024.0**3
_CGROUP = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""
_NEVER = 2**31 - 1
_FULL_EVERY_STEPS = 10


def disable_memory_trim() -> None:
    """Keep freed memory in this process for its next allocations; has no effect if malloc is not glibc's.

    Every step of a driver allocates arrays of the same gigabytes. The kernel clears each page that it hands out, and a virtual
    machine may first request the page from its host, which takes longer than filling it. The process does not shrink between
    steps.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)  # a block with its own mapping would be returned to the kernel
        mallopt(_TRIM_THRESHOLD, -1)


def pop_host_peak_gib() -> float:
    """Return this process's peak resident memory since the last call, in GiB; the current value if the kernel has no peak."""
    try:
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak (proc(5))
    except OSError:
        peak = None
    return int(peak[1]) * 1024 / _GIB if peak else psutil.Process().memory_info().rss / _GIB


def host_used_share() -> float:
    """Return the share of the machine's memory that is not available to further processes."""
    memory = psutil.virtual_memory()
    return 1.0 - memory.available / memory.total


def available_bytes() -> int:
    """Return the host memory that this process may still allocate, limited by its control group (a container, a job)."""
    available = psutil.virtual_memory().available
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        # The group's usage includes inactive file pages, which the kernel reclaims first.
        idle = re.search(r"^inactive_file (\d+)", (_CGROUP / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no control group (version 2), or "max"
        return available
    return min(available, max(0, limit - used + (int(idle[1]) if idle else 0)))


def num_ranks_here() -> int:
    """Return the number of ranks that a launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_bytes_per_rank() -> int:
    """Return this rank's equal share of ``available_bytes``, because all ranks of the machine allocate at the same time."""
    return available_bytes() // num_ranks_here()


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection inside the block; objects that exist at its end are never examined again.

    For imports: the collector would walk the growing heap repeatedly and find nothing, which costs a tenth to a fifth of the
    time to import torch, Megatron and transformers.
    """
    if not gc.isenabled():
        yield  # inside another such block
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def gc_young_only() -> Iterator[None]:
    """Collect only young objects inside the block, and freeze existing ones (above all prompts).

    For a run's event loop, which must not pause within a step: the run calls ``gc_between_windows`` when no reply is awaited.
    """
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0], _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def gc_between_windows(step: int) -> None:
    """Collect the objects that were made since the last call; in every tenth step also the older ones.

    Garbage is rarely older than a step, and a visit to all objects takes 3 % of a step of a tiny model.
    """
    gc.collect(1 if step % _FULL_EVERY_STEPS else 2)
