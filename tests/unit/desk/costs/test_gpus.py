"""Descriptions of GPUs are complete: desk/costs/gpus.py and gpus.yaml."""

import pytest

from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.errors import ConfigError


def test_gpus_are_described_whole(tmp_path):
    for name in ("A100-80G", "H100-80G", "H200", "H20", "B200"):
        described = gpu(name)
        assert described.source and described.flops["bfloat16"] > 1e14 and described.hbm_bandwidth > 1e12
    with pytest.raises(ConfigError, match="described: A100-80G, H100-80G"):
        gpu("H100")
    own = tmp_path / "own.yaml"
    own.write_text("mine: {source: x}\n")
    with pytest.raises(ConfigError, match="mine: expected the fields flops, hbm_bandwidth"):
        gpu("mine", own)
