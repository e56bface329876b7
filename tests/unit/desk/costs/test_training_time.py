"""Laws of the seconds of training and of a publish: desk/costs/training_time.py."""

import pytest
from transformers import AutoConfig

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.training_time import Efficiency, PublishCosts, bubble, publish_seconds, training_seconds
from megatron_rl.families.flops import flops_cost
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.tiny_families import COMMON, SHAPES

declare_torchvision_ops()
H100 = gpu("H100-80G")


def config_of(name: str):
    fields = {**COMMON, **SHAPES[name]}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def test_dense_model_trains_at_its_fraction_of_the_peak():
    config, lengths = config_of("llama3_scaled"), [30, 50, 50]
    seconds = training_seconds(config, ParallelConfig(), H100, lengths, num_ranks=4)
    flops = 3 * sum(map(flops_cost(config), lengths))
    assert flops / seconds / 4 == pytest.approx(H100.flops["bfloat16"] * Efficiency().products)


def test_a_pipeline_idles_while_it_fills():
    parallel, _ = parse_layout("pp4+vpp2")
    assert bubble(parallel, 6) == 3 / 12
    config = config_of("llama3_scaled")
    one = training_seconds(config, ParallelConfig(), H100, [64], num_ranks=4)
    assert training_seconds(config, parallel, H100, [64], num_ranks=4, num_packs=6) == pytest.approx(1.25 * one)


def test_experts_on_more_nodes_cost_more():
    config = config_of("qwen3_moe")
    times = [
        training_seconds(config, parse_layout(f"ep{size}")[0], H100, [64] * 8, num_ranks=32) for size in (1, 8, 16, 32)
    ]
    assert times[0] == times[1] < times[2] < times[3]
    hidden = training_seconds(
        config, parse_layout("ep32")[0], H100, [64] * 8, num_ranks=32, efficiency=Efficiency(exposed_network=0)
    )
    assert hidden == times[0]


def test_a_publish_grows_with_bytes_and_servers():
    def seconds(num_bytes: float = 1e11, way="broadcast", stages: int = 1, gpus: int = 16) -> float:
        return publish_seconds(num_bytes, H100, way=way, num_stages=stages, num_server_gpus=gpus, gpus_per_server=8)

    assert seconds(2e11) == pytest.approx(2 * seconds())
    assert seconds(gpus=64) > seconds() > seconds(stages=4) > seconds(way="point_to_point", stages=4)
    assert seconds(way="point_to_point", gpus=64) == seconds(way="point_to_point")


def test_requests_slow_a_publish_only_if_buckets_are_small():
    def seconds(bucket_bytes: int, gpus: int) -> float:
        return publish_seconds(
            1e11, H100, way="broadcast", num_stages=1, num_server_gpus=gpus, gpus_per_server=8, bucket_bytes=bucket_bytes
        )

    assert seconds(2**30, 256) == seconds(2**31, 256)
    costs = PublishCosts()
    assert seconds(2**20, 256) == pytest.approx(1e11 * (costs.gather + 32 / 2**20 * costs.request_s))
    assert seconds(2**20, 256) > seconds(2**20, 128) > seconds(2**30, 128)
