"""Host memory: its use by this process and this machine, and freed blocks that malloc keeps."""

import ctypes
import os
import re
from pathlib import Path

import psutil

_GIB = 1024.0**3
_CGROUP = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""


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
