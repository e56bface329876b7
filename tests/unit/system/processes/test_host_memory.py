"""Peak memory since the last call, the used share, and freed memory that the process keeps."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.system.processes.host_memory import host_used_share, pop_host_peak_gib


def test_memory_peak_is_reported_once():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this kernel keeps no mark that can be reset: what is used now is reported instead")
    before = pop_host_peak_gib()
    block = bytearray(256 << 20)
    block[:: 4096] = b"1" * len(block[:: 4096])
    del block
    assert pop_host_peak_gib() > before + 0.2
    assert pop_host_peak_gib() < before + 0.1


def test_the_used_share_is_a_share():
    assert 0 < host_used_share() < 1


_FREED = """
import sys, numpy as np, psutil
from megatron_rl.system.processes.host_memory import disable_memory_trim
if sys.argv[1] == "keep":
    disable_memory_trim()
made = [np.ones(64 << 20, np.uint8) for _ in range(4)]
full = psutil.Process().memory_info().rss
del made
print((full - psutil.Process().memory_info().rss) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc decides for itself")
def test_freed_memory_stays_after_disable_memory_trim():
    given_back = {
        way: int(subprocess.run([sys.executable, "-c", _FREED, way], capture_output=True, text=True, check=True, timeout=300).stdout)
        for way in ("keep", "give back")
    }
    assert given_back["keep"] < 32 and given_back["give back"] > 200, given_back
