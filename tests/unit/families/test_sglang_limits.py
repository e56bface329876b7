"""Models that SGLang computes differently are detected in config.json and reported with key and remedy.

Mapping from a checkpoint's tensors to SGLang's parameters.
"""

import json
from typing import Any

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.errors import ConfigError
from megatron_rl.families.model_facts import with_text
from megatron_rl.families.sglang_limits import engine_problems, joined_name, split_problems
from tests.tiny_families import COMMON, LINEAR_SHAPES, SHAPES
from tests.unit.config.recipes import SPARSE, load

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16)


def problems(**model: Any) -> list[str]:
    return list(engine_problems(with_text(model), "config.json"))


@pytest.mark.parametrize(
    "model",
    [
        dict(model_type="qwen3_moe", mlp_only_layers=[], decoder_sparse_step=1, tie_word_embeddings=False),
        dict(model_type="qwen3", tie_word_embeddings=True),
        dict(model_type="llama", rope_scaling=dict(type="linear", factor=2.0), rope_theta=5e5),
        dict(model_type="qwen2", rope_parameters=YARN),
        dict(model_type="qwen2", rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}),
        dict(model_type="deepseek_v3", rope_scaling=YARN, tie_word_embeddings=True),
        dict(model_type="deepseek_v3", rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}),
        dict(model_type="mixtral", rope_theta=1e6, hidden_size=64, num_attention_heads=4, head_dim=16),
        dict(model_type="qwen3_vl", text_config=dict(tie_word_embeddings=True)),
        dict(model_type="qwen2_5_vl", vision_config=dict(patch_size=14, in_chans=3)),
    ],
)
def test_models_computed_alike_by_sglang_have_no_problem(model: dict[str, Any]) -> None:
    assert problems(**model) == []


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        (dict(model_type="qwen3_moe", mlp_only_layers=[3]), ["mlp_only_layers=[3]", "every layer"]),
        (dict(model_type="qwen3_moe", decoder_sparse_step=2), ["decoder_sparse_step=2", "sft"]),
        (
            dict(model_type="qwen3_vl_moe", text_config=dict(decoder_sparse_step=2)),
            ["decoder_sparse_step=2", "every layer"],
        ),
        *(
            (dict(model_type=name, tie_word_embeddings=True), ["tie_word_embeddings=true", "lm_head.weight"])
            for name in ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss")
        ),
        (dict(model_type="mixtral", rope_scaling=dict(type="linear", factor=2.0)), ["rope_type=linear"]),
        (dict(model_type="mixtral", hidden_size=64, num_attention_heads=4, head_dim=20), ["head_dim=20", "16"]),
        (dict(model_type="mixtral", rope_theta=0.5), ["rope_theta=0.5"]),
        (dict(model_type="gpt_oss", quantization_config=dict(quant_method="mxfp4")), ["MXFP4", "convert --to megatron"]),
        (dict(model_type="qwen2_5_vl", vision_config=dict(patch_size=8)), ["patch_size=8", "384 values", "crashes"]),
        (dict(model_type="deepseek_v3", rope_parameters=dict(rope_type="linear", factor=2.0)), ["rope_type=linear"]),
        (dict(model_type="deepseek_v3", rope_parameters={**YARN, "truncate": False}), ["truncate=false"]),
        (dict(model_type="qwen2", rope_parameters={**YARN, "attention_factor": 0.8}), ["attn_factor=0.6622"]),
        (dict(model_type="qwen3", rope_parameters={**YARN, "mscale": 0.5, "mscale_all_dim": 0.0}), ["attn_factor="]),
    ],
)
def test_sglang_differences_are_reported_with_a_remedy(model: dict[str, Any], texts: list[str]) -> None:
    (problem,) = problems(**model)
    assert problem.startswith("policy.path: config.json: ") and all(text in problem for text in texts), problem


REFUSED_SHAPES = {
    "qwen2_yarn_one_group": "put attn_factor=",
    "qwen3_moe": "store a copy of model.embed_tokens.weight",
    "qwen3_moe_sparse_step": "treats every layer as a mixture of experts",
}


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in LINEAR_SHAPES])
def test_odd_shapes_are_rejected_only_if_sglang_differs(shape: str) -> None:
    """All other shapes were compared on servers: their log-probs agree within 1e-4."""
    found = problems(**{**COMMON, **SHAPES[shape]})
    assert bool(found) is (shape in REFUSED_SHAPES)
    assert all(REFUSED_SHAPES[shape] in text for text in found)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"full_attention_interval": None}, "full_attention_interval=None: SGLang's qwen3_5_text reads it instead of layer_types"),
        ({"full_attention_interval": 2}, "full_attention_interval=2: SGLang's qwen3_5_text reads it instead of layer_types"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=1.0 in rope_parameters: SGLang's qwen3_5_text takes 0.25"),
        ({"rope_theta": 5000.0}, "rope_theta=10000.0 in rope_parameters: SGLang's qwen3_5_text takes 5000.0"),
    ],
)
def test_fields_of_linear_attention_must_be_where_sglang_reads_them(fields: dict[str, Any], text: str) -> None:
    layers = ["linear_attention"] * 3 + ["full_attention"]
    served = {"full_attention_interval": 4, "layer_types": layers, "partial_rotary_factor": 1.0}
    found = problems(**{**COMMON, **LINEAR_SHAPES["qwen3_5"], **served, **fields})
    assert [text in problem for problem in found] == [True] * bool(text), found


@pytest.mark.parametrize(
    "extra", [{"attention_factor": 0.8}, {"attention_factor": 1.7}, {"mscale": 0.5, "mscale_all_dim": 0}]
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "deepseek_v3"])
def test_attention_factor_remedy_makes_both_factors_equal(model_type: str, extra: dict[str, Any]) -> None:
    rope = {**YARN, **extra}
    (problem,) = problems(model_type=model_type, rope_parameters=rope)
    value = float(problem.split("put attn_factor=")[1].split(" ")[0])
    assert problems(model_type=model_type, rope_parameters={**rope, "attn_factor": value}) == []


@pytest.mark.parametrize(
    ("tp", "heads", "groups", "ok"),
    [(2, 8, 4, True), (8, 8, 4, True), (4, 8, 2, True), (3, 8, 4, False), (4, 12, 6, False)],
)
def test_servers_need_even_splits_of_heads_and_groups(tp: int, heads: int, groups: int, ok: bool) -> None:
    model = dict(model_type="qwen3", num_attention_heads=heads, num_key_value_heads=groups)
    assert (not list(split_problems(model, tp, "config.json"))) is ok


def test_only_sampling_commands_reject_sglang_differences(tmp_path) -> None:
    config = load(tmp_path, {**SPARSE, "decoder_sparse_step": 2})
    config.critic_pretrain.output_path = str(tmp_path / "critic")
    for command in ("train", "critic-pretrain"):
        with pytest.raises(ConfigError, match="decoder_sparse_step=2"):
            check_config(config, command=command)
    config.sft.output_path = str(tmp_path / "out")
    check_config(config, command="sft")


def test_yarn_factors_equal_those_of_the_libraries() -> None:
    """The two factors compared above equal those of transformers and SGLang."""
    from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

    declare_torchvision_ops()
    import torch
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from megatron_rl.families.sglang_limits import _attention_factor

    for extra in ({}, {"attention_factor": 0.8}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"mscale": 0.5}):
        rope = {**YARN, **extra}
        config = AutoConfig.for_model("qwen2", rope_parameters=dict(rope), max_position_embeddings=128)
        _, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        assert _attention_factor(rope, 8.0) == pytest.approx(factor, rel=1e-12), json.dumps(extra)


def test_names_present_on_the_server_are_not_joined():
    assert joined_name("mlp.gate_proj.weight", {"mlp.gate_proj.weight"}) == ("mlp.gate_proj.weight", 0)
    assert joined_name("mlp.up_proj.bias", {"mlp.gate_up_proj.bias"}) == ("mlp.gate_up_proj.bias", 1)
    assert joined_name("mlp.up_proj.bias", {"norm.weight"}) is None
