"""Seconds against brute force, and their laws: desk/costs: training_time, serving_time, publish_time, gpus.

Closed forms of a step's seconds: megatron_rl/desk/costs/training_time.py.
"""

import random

import pytest
from transformers import AutoConfig

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.serving_time import (
    ServerCosts,
    decode_seconds,
    generation_seconds,
    kv_bytes,
    kv_tokens,
    prefill_seconds,
    stream_seconds,
)
from megatron_rl.desk.costs.training_time import (
    Efficiency,
    PublishCosts,
    TrainingBatchWork,
    asynchronous_step_seconds,
    bubble,
    publish_seconds,
    straggler_factor,
    training_seconds,
)
from megatron_rl.errors import ConfigError
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
    seconds = training_seconds(config, ParallelConfig(), H100, TrainingBatchWork(lengths), num_ranks=4)
    flops = 3 * sum(map(flops_cost(config), lengths))
    assert flops / seconds / 4 == pytest.approx(H100.flops["bfloat16"] * Efficiency().products)


def test_a_pipeline_idles_while_it_fills():
    parallel, _ = parse_layout("pp4+vpp2")
    assert bubble(parallel, 6) == 3 / 12
    config = config_of("llama3_scaled")
    one = training_seconds(config, ParallelConfig(), H100, TrainingBatchWork([64]), num_ranks=4)
    assert training_seconds(config, parallel, H100, TrainingBatchWork([64], num_packs=6), num_ranks=4) == pytest.approx(1.25 * one)


def test_experts_on_more_nodes_cost_more():
    config = config_of("qwen3_moe")
    times = [
        training_seconds(config, parse_layout(f"ep{size}")[0], H100, TrainingBatchWork([64] * 8), num_ranks=32) for size in (1, 8, 16, 32)
    ]
    assert times[0] == times[1] < times[2] < times[3]
    hidden = training_seconds(
        config, parse_layout("ep32")[0], H100, TrainingBatchWork([64] * 8), num_ranks=32, efficiency=Efficiency(exposed_network=0)
    )
    assert hidden == times[0]


def test_a_decode_step_reads_weights_and_cache():
    config = config_of("llama3_scaled")
    costs = ServerCosts(bandwidth=1.0, floor_s=0.0, layer_s=0.0, sequence_s=0.0, all_reduce_s=0.0)

    def step(running: float, context: float) -> float:
        return decode_seconds(config, H100, num_gpus=1, running=running, context_tokens=context, costs=costs)

    cache = 2 * 2 * 4 * 26 * 2  # layers, keys and values, heads, their size, bytes
    assert kv_bytes(config, 1) == cache
    assert step(8, 100) - step(8, 50) == pytest.approx(8 * 50 * cache / H100.hbm_bandwidth)
    layer = 48 * 26 * 4 * 4 + 3 * 48 * 80 + 2 * 48
    assert step(1, 0) == pytest.approx(2 * (2 * layer + 48 + 101 * 48) / H100.hbm_bandwidth)


def test_few_sequences_read_few_experts():
    config = config_of("qwen3_moe")
    costs = ServerCosts(bandwidth=1.0, floor_s=0.0, layer_s=0.0, sequence_s=0.0)
    steps = [decode_seconds(config, H100, num_gpus=1, running=n, context_tokens=0, costs=costs) for n in (1, 2, 4, 400)]
    experts = 2 * 4 * 3 * 48 * 36 * 2 / H100.hbm_bandwidth  # layers, experts, matrices, bytes
    assert steps[3] - steps[0] == pytest.approx(experts / 2)  # a token chooses 2 of 4
    assert steps[1] - steps[0] == pytest.approx(experts / 4)


def test_kv_cache_gets_the_memory_that_weights_leave_free():
    config = config_of("llama3_scaled")
    assert kv_tokens(config, H100, num_gpus=1, memory_fraction=0.5) * kv_bytes(config, 1) < 40e9
    assert kv_tokens(config, H100, num_gpus=1, memory_fraction=0.0) < 0
    # Key and value heads are copied once each GPU has only one.
    assert kv_bytes(config, 8) == kv_bytes(config, 4) == kv_bytes(config, 1) / 4
    assert kv_bytes(config_of("deepseek_v3_yarn"), 8) == 2 * (18 + 6) * 2


def test_prefill_takes_the_seconds_of_its_matrix_products():
    config = config_of("llama3_scaled")
    expected = flops_cost(config)(100) / (2 * H100.flops["bfloat16"] * ServerCosts().products)
    assert prefill_seconds(config, H100, num_gpus=2, lengths=[100]) == pytest.approx(expected)


def brute_force(step_seconds, lengths, prompt_tokens, max_running):
    """Simulates one decode step at a time, with the mean context at the middle of the step."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < max_running:
            running.append([waiting.pop(0), 0])
        context = prompt_tokens + sum(done + 0.5 for _, done in running) / len(running)
        seconds += step_seconds(len(running), context)
        for response in running:
            response[1] += 1
        running = [response for response in running if response[1] < response[0]]
    return seconds


@pytest.mark.parametrize("max_running", [1, 3, 7, 100])
def test_generation_equals_the_sum_of_its_decode_steps(max_running):
    rng = random.Random(max_running)
    lengths = [min(1 + int(rng.paretovariate(1.1) * 4), 200) for _ in range(40)]

    def step(running: float, context: float) -> float:
        return 1.0 + 0.01 * running + 0.001 * running * context

    expected = brute_force(step, lengths, 20, max_running)
    assert generation_seconds(step, lengths, prompt_tokens=20, max_running=max_running) == pytest.approx(expected)


def test_servers_across_machines_pay_for_their_all_reduces():
    config, costs = config_of("llama3_scaled"), ServerCosts()

    def step(num_gpus: int) -> float:
        return decode_seconds(config, H100, num_gpus=num_gpus, running=1, context_tokens=0)

    assert step(8) - step(1) == pytest.approx(2 * 2 * costs.all_reduce_s, rel=0.01)
    assert step(16) - step(8) == pytest.approx(2 * 2 * (costs.far_all_reduce_s - costs.all_reduce_s), rel=0.01)


def test_a_stream_does_not_wait_for_the_longest():
    """Steps of one second: 4 slots are always full, so a batch takes its tokens / 4 seconds; a drained batch takes 100."""
    lengths = [100] + [10] * 30

    def step(running: float, context: float) -> float:
        return 1.0

    def drained(lengths, max_running=4):
        return generation_seconds(step, lengths, prompt_tokens=0, max_running=max_running)

    assert drained(lengths) == 100
    stream = stream_seconds(step, lengths, prompt_tokens=0, max_running=4)
    assert stream == pytest.approx(sum(lengths) / 4, rel=0.05) and stream < drained(lengths[::-1])


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


def test_equal_sequences_have_no_stragglers():
    assert straggler_factor([2.0] * 64, num_replicas=4, sequences_per_update=16) == pytest.approx(1.0)
    assert straggler_factor([1.0, 9.0, 3.0], num_replicas=1, sequences_per_update=1) == pytest.approx(1.0)


def test_one_long_sequence_delays_all_replicas_of_its_update():
    """15 of cost 1 and one of 17: two updates of 8 on 4 replicas take 2 and 18 instead of 4 each when balanced."""
    assert straggler_factor([1.0] * 15 + [17.0], num_replicas=4, sequences_per_update=8) == pytest.approx(20 / 8)


def test_a_heavy_tail_gains_little_from_more_replicas():
    rng = random.Random(0)
    costs = [rng.paretovariate(1.15) for _ in range(2048)]

    def seconds(replicas: int) -> float:
        return straggler_factor(costs, num_replicas=replicas, sequences_per_update=256) / replicas

    assert seconds(4) > seconds(8) > seconds(32) > seconds(4) / 8
    one_update = straggler_factor(costs, num_replicas=8, sequences_per_update=2048)
    assert one_update < straggler_factor(costs, num_replicas=8, sequences_per_update=256)


def test_an_asynchronous_step_is_its_slowest_part():
    assert asynchronous_step_seconds(train=10, stream=7, publish=1) == 11
    assert asynchronous_step_seconds(train=10, stream=17, publish=1) == 18
    assert asynchronous_step_seconds(train=10, stream=7, publish=1, batch=30, staleness=1) == 31
    assert asynchronous_step_seconds(train=10, stream=7, publish=1, batch=30, staleness=8) == 11
