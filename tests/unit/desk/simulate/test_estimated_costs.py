"""Estimated costs give the seconds of the formulas that they come from: megatron_rl/desk/simulate/estimated_costs.py."""

import json

import numpy as np
import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.serving_time import decode_curve, prefill_seconds
from megatron_rl.desk.costs.training_time import REINFORCEMENT, training_seconds
from megatron_rl.desk.simulate.estimated_costs import estimated_kv_tokens, estimated_timing
from megatron_rl.errors import ConfigError
from megatron_rl.families.model_facts import as_config, read_model_json

H100 = gpu("H100-80G")
NO_COPIES = ("policy.offload=never", "critic.offload=never")
MODEL = dict(
    model_type="qwen3_moe",
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    vocab_size=4096,
    tie_word_embeddings=False,
)


@pytest.fixture
def configured(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def make(*words: str) -> Config:
        common = [
            f"policy.path={tmp_path}",
            "parallel.num_ranks=8",
            "rollout.num_servers=2",
            "rollout.tensor_parallel_size=2",
        ]
        return load_config(None, [*common, *words])

    return make


def model_of(config: Config):
    return as_config(read_model_json(config.policy.path))


def test_stages_take_what_their_passes_take(configured):
    config = configured("policy.recompute=full", "critic.parallel.tensor_parallel_size=2", *NO_COPIES)
    timing, lengths = estimated_timing(config, H100), np.array([100, 100, 3000])
    for name, passes in {"old_logprobs": 1, "values": 1, "update_policy": 4, "update_critic": 3}.items():
        expected = training_seconds(
            model_of(config),
            config.parallel,
            H100,
            lengths.tolist(),
            num_ranks=8,
            passes=passes,
            efficiency=REINFORCEMENT,
        )
        seconds = timing.stage(name).seconds(tokens=lengths.sum(), squares=(lengths**2.0).sum(), rows=3, updates=1)
        assert seconds == pytest.approx(expected)


def test_a_pipeline_fills_once_per_update(configured):
    """The bubble is the same number of seconds however many packs follow."""
    config = configured(
        "parallel.pipeline_parallel_size=4",
        "parallel.virtual_pipeline_size=2",
        "batch.max_tokens_per_microbatch=4096",
        *NO_COPIES,
    )
    cost = estimated_timing(config, H100).stage("update_policy")
    for packs in (4, 16):
        tokens = packs * 2 * 4096  # on two replicas
        flat = cost.seconds(tokens=tokens)
        assert cost.seconds(tokens=tokens, updates=1) == pytest.approx(flat * (1 + 3 / (2 * packs)))


def test_an_offloaded_model_is_copied_to_the_device_and_after_an_update_back(configured):
    """In bfloat16 on one replica: 2 bytes of weights per parameter and pass, 14 with the optimizer, each way, in an update."""
    words = ["policy.dtype=bfloat16", "parallel.tensor_parallel_size=2", "parallel.num_ranks=2", "rollout.num_servers=1"]
    moved, kept = (estimated_timing(configured(*words, *more), H100) for more in ((), NO_COPIES))

    def copied(name: str) -> float:
        return 25e9 * (moved.stage(name).fixed_s - kept.stage(name).fixed_s)

    weights = copied("old_logprobs")
    assert weights == pytest.approx(2 * num_parameters(model_of(configured())) / 2, rel=0.02)
    assert copied("publish") == pytest.approx(weights) and copied("update_policy") == pytest.approx(14 * weights)
    assert copied("update_critic") == pytest.approx(14 * copied("values"))
    alone = estimated_timing(configured("preset=dapo", *words), H100)
    assert alone.stage("old_logprobs").fixed_s == 0, "a single model stays on the device"


def test_server_costs_equal_the_roofline(configured):
    config = configured()
    timing, model = estimated_timing(config, H100), model_of(config)
    for running in (1, 64, 4096):
        step = timing.decode.seconds(np.array(running)) + timing.decode.context_token_s * running * 500
        assert step == pytest.approx(decode_curve(model, H100, num_gpus=2)(running, 500))
    prefill = timing.prefill.seconds(tokens=700, squares=700.0**2)
    assert prefill == pytest.approx(prefill_seconds(model, H100, num_gpus=2, lengths=[700]))
    assert timing.stage("publish").fixed_s > 0


def test_estimates_report_missing_keys(configured, tmp_path):
    assert estimated_kv_tokens(configured(), H100) > 10_000_000
    with pytest.raises(ConfigError, match="no room for a KV cache.*mem-fraction-static 0.0001"):
        estimated_kv_tokens(configured("rollout.server_args.mem-fraction-static=0.0001"), H100)
    with pytest.raises(ConfigError, match="expected the number of trainer ranks"):
        estimated_timing(configured("parallel.num_ranks=0"), H100)
    with pytest.raises(ConfigError, match="do not divide"):
        estimated_timing(configured("parallel.tensor_parallel_size=3"), H100)
    with pytest.raises(ConfigError, match=r"expected a folder with the model's config\.json"):
        estimated_timing(configured(f"policy.path={tmp_path / 'none'}"), H100)
