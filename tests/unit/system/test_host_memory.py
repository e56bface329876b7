"""What this process used at most since it was last asked."""

from pathlib import Path

import pytest

from megatron_rl.system.host_memory import host_used_share, take_host_peak_gib


def test_a_peak_that_is_over_is_seen_once():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this kernel keeps no mark that can be reset: what is used now is reported instead")
    before = take_host_peak_gib()
    block = bytearray(256 << 20)
    block[:: 4096] = b"1" * len(block[:: 4096])
    del block
    assert take_host_peak_gib() > before + 0.2
    assert take_host_peak_gib() < before + 0.1


def test_the_used_share_is_a_share():
    assert 0 < host_used_share() < 1
