"""Laws of the seconds and the memory of a server: desk/costs/serving_time.py."""

import pytest
from transformers import AutoConfig

from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.serving_time import ServerCosts, decode_curve, kv_bytes, kv_tokens, prefill_seconds
from megatron_rl.families.flops import flops_cost
from megatron_rl.families.model_facts import layer_windows
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.tiny_families import COMMON, SHAPES

declare_torchvision_ops()
H100 = gpu("H100-80G")


def config_of(name: str):
    fields = {**COMMON, **SHAPES[name]}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def test_a_decode_step_reads_weights_and_cache():
    config = config_of("llama3_scaled")
    costs = ServerCosts(bandwidth=1.0, floor_s=0.0, layer_s=0.0, sequence_s=0.0, all_reduce_s=0.0)

    def step(running: float, context: float) -> float:
        return decode_curve(config, H100, num_gpus=1, costs=costs)(running, context)

    cache = 2 * 2 * 4 * 26 * 2  # layers, keys and values, heads, their size, bytes
    assert kv_bytes(config, 1) == cache
    assert step(8, 100) - step(8, 50) == pytest.approx(8 * 50 * cache / H100.hbm_bandwidth)
    layer = 48 * 26 * 4 * 4 + 3 * 48 * 80 + 2 * 48
    assert step(1, 0) == pytest.approx(2 * (2 * layer + 48 + 101 * 48) / H100.hbm_bandwidth)


def test_layers_with_a_window_read_no_more_than_it_and_have_a_smaller_cache():
    config = config_of("gpt_oss")
    costs = ServerCosts(bandwidth=1.0, products=100.0, floor_s=0.0, layer_s=0.0, sequence_s=0.0)
    step = decode_curve(config, H100, num_gpus=1, costs=costs)
    windows = layer_windows(config)
    (window,) = {window for window in windows if window}
    full, layer = windows.count(None), 2 * config.num_key_value_heads * config.head_dim * 2
    assert 0 < full < len(windows)
    assert step(8, window) - step(8, 0) == pytest.approx(8 * window * len(windows) * layer / H100.hbm_bandwidth)
    assert step(8, 9 * window) - step(8, window) == pytest.approx(8 * 8 * window * full * layer / H100.hbm_bandwidth)
    assert kv_bytes(config, 1) == pytest.approx(layer * (full + 0.8 * (len(windows) - full)))
    config.layer_types = ["sliding_attention"] * len(windows)
    assert kv_bytes(config, 1) == layer * len(windows)


def test_few_sequences_read_few_experts():
    config = config_of("qwen3_moe")
    costs = ServerCosts(bandwidth=1.0, products=100.0, floor_s=0.0, layer_s=0.0, sequence_s=0.0)
    steps = [decode_curve(config, H100, num_gpus=1, costs=costs)(n, 0) for n in (1, 2, 4, 400)]
    experts = 2 * 4 * 3 * 48 * 36 * 2 / H100.hbm_bandwidth  # layers, experts, matrices, bytes
    assert steps[3] - steps[0] == pytest.approx(experts / 2)  # a token chooses 2 of 4
    assert steps[1] - steps[0] == pytest.approx(experts / 4)


@pytest.mark.parametrize("num_gpus", [1, 4])
def test_many_sequences_take_the_seconds_of_their_products(num_gpus):
    config, running = config_of("llama3_scaled"), 4000
    costs = ServerCosts(floor_s=0.0, layer_s=0.0, sequence_s=0.0, all_reduce_s=0.0)
    expected = running * flops_cost(config).per_token / (num_gpus * H100.flops["bfloat16"] * costs.products)
    assert decode_curve(config, H100, num_gpus=num_gpus, costs=costs)(running, 0) == pytest.approx(expected)


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


def test_servers_across_machines_pay_for_their_all_reduces():
    config, costs = config_of("llama3_scaled"), ServerCosts()

    def step(num_gpus: int) -> float:
        return decode_curve(config, H100, num_gpus=num_gpus)(1, 0)

    assert step(8) - step(1) == pytest.approx(2 * 2 * costs.all_reduce_s, rel=0.01)
    assert step(16) - step(8) == pytest.approx(2 * 2 * (costs.far_all_reduce_s - costs.all_reduce_s), rel=0.01)
