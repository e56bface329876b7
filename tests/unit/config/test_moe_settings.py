"""``policy.moe`` is checked before anything starts, without importing Megatron."""

import json

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import RoutingReplay
from megatron_rl.errors import ConfigError

DENSE = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 32,
    "max_position_embeddings": 256,
}
SPARSE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
BIASED = {**SPARSE, "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 1, "topk_method": "noaux_tc"}


def load(tmp_path, model: dict, *overrides: str):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"""
preset: tppo
policy: {{path: {tmp_path}/model}}
data: {{train_files: [{tmp_path}/train.jsonl]}}
batch: {{max_prompt_tokens: 64, max_response_tokens: 96, window_tokens: 32}}
"""
    )
    return load_config(file, [f"policy.moe.{text}" if not text.startswith("algorithm") else text for text in overrides])


@pytest.mark.parametrize(
    "model,overrides",
    [
        (DENSE, []),
        (DENSE, ["router_dtype=fp64", "dispatcher=alltoall"]),
        (SPARSE, ["routing_replay=R2"]),
        (SPARSE, ["routing_replay=R3", "load_balancing=aux_loss", "aux_loss_coef=0.001"]),
        (SPARSE, ["routing_replay=R3", "algorithm.correction.old_policy=rollout"]),
        (BIASED, ["load_balancing=bias", "bias_update_rate=0.001"]),
        (BIASED, ["load_balancing=bias"]),
    ],
)
def test_settings_that_fit_the_model_pass(tmp_path, model, overrides):
    check_config(load(tmp_path, model, *overrides), command="train")


@pytest.mark.parametrize(
    "model,overrides,expected",
    [
        (DENSE, ["routing_replay=R3"], ["policy.moe.routing_replay=R3", "needs an MoE model", "config.json"]),
        (DENSE, ["load_balancing=bias"], ["policy.moe.load_balancing=bias", "needs an MoE model"]),
        (SPARSE, ["load_balancing=bias"], ["policy.moe.load_balancing=bias", "qwen3_moe have no expert bias"]),
        (SPARSE, ["load_balancing=aux_loss"], ["policy.moe.aux_loss_coef", "needs a coefficient above 0"]),
        (SPARSE, ["aux_loss_coef=0.1"], ["policy.moe.aux_loss_coef: got 0.1 with load_balancing=none"]),
        (SPARSE, ["aux_loss_coef=-1"], ["policy.moe.aux_loss_coef: expected at least 0"]),
        (BIASED, ["bias_update_rate=0.1"], ["policy.moe.bias_update_rate", "only load_balancing=bias"]),
        (
            SPARSE,
            ["routing_replay=R2", "algorithm.correction.old_policy=rollout"],
            ["policy.moe.routing_replay=R2", "algorithm.correction.old_policy=rollout", "R3"],
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_key_and_remedy(tmp_path, model, overrides, expected):
    with pytest.raises(ConfigError) as error:
        check_config(load(tmp_path, model, *overrides), command="train")
    for text in expected:
        assert text in str(error.value)


def test_an_unknown_kind_of_replay_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, SPARSE, "routing_replay=R4")
    assert all(kind.value in str(error.value) for kind in RoutingReplay)
