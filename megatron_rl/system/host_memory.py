"""How much memory this process and this machine use."""

import re
from pathlib import Path

import psutil

_GIB = 1024.0**3


def take_host_peak_gib() -> float:
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
