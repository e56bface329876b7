"""How much memory this process and this machine use, and what becomes of what it no longer needs."""

import ctypes
import os
import re
from pathlib import Path

import psutil

_GIB = 1024.0**3
_CGROUP = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Names of glibc's mallopt(3)."""


def disable_memory_trim() -> None:
    """From now on memory that is freed stays with this process, for what it asks for next.

    For a driver, whose steps make arrays of the same gigabytes again and again: the kernel clears all that it gives, and a virtual
    machine may first have to ask its host for it, which takes longer than the numbers in it. The process is as large between
    steps as in them. Nothing changes where malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)  # a large block of its own would be given back
        mallopt(_TRIM_THRESHOLD, -1)


def pop_host_peak_gib() -> float:
    """Largest resident memory of this process since the last call, GiB; where the kernel keeps no such mark, what it is now."""
    try:
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        Path("/proc/self/clear_refs").write_text("5")  # begins a new high-water mark (proc(5))
    except OSError:
        peak = None
    return int(peak[1]) * 1024 / _GIB if peak else psutil.Process().memory_info().rss / _GIB


def host_used_share() -> float:
    """Share of the machine's memory that cannot be given to anybody else, servers and graders included."""
    memory = psutil.virtual_memory()
    return 1.0 - memory.available / memory.total


def available_bytes() -> int:
    """Host memory that this process may still take: the machine's, or what its control group (a container, a job) is left."""
    available = psutil.virtual_memory().available
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        # Pages of files that nobody uses count as used there, and are given up first.
        idle = re.search(r"^inactive_file (\d+)", (_CGROUP / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no control group (version 2), or "max"
        return available
    return min(available, max(0, limit - used + (int(idle[1]) if idle else 0)))


def num_ranks_here() -> int:
    """Ranks that a launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_bytes_per_rank() -> int:
    """Bytes of ``available_bytes`` for this rank, where the others of its machine take as much at the same time."""
    return available_bytes() // num_ranks_here()
