"""Targets of adapters: what they match, what is refused, and the shapes of their tensors."""

import math

import pytest

from megatron_rl.errors import ModelError
from megatron_rl.families.adapters import ALL_LINEAR, adapted_linears, linear_modules
from megatron_rl.families.model_facts import as_config
from megatron_rl.families.parameters import entries
from tests.tiny_families import LINEAR_SHAPES, SHAPES, family_config

CONFIGS = {name: family_config(name) for name in SHAPES if name not in LINEAR_SHAPES}


def modules(shape: str, *targets: str) -> list[str]:
    return [module for linear in adapted_linears(CONFIGS[shape], targets, 3) for module in linear.modules]


@pytest.mark.parametrize("shape", CONFIGS)
def test_all_linear_is_every_linear_layer_but_those_of_routed_experts(shape):
    expected = [name for name in linear_modules(CONFIGS[shape]) if ".experts." not in name]
    assert modules(shape, ALL_LINEAR) == expected and expected
    assert not any(word in name for name in expected for word in ("norm", "mlp.gate.", "embed", "lm_head"))


@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_all_linear_is_refused_if_linear_layers_would_be_left_out(shape):
    config = family_config(shape)
    with pytest.raises(ModelError, match="all-linear: in_proj_.*q_proj, k_proj, v_proj of this model can have no adapter"):
        adapted_linears(config, [ALL_LINEAR], 3)
    assert adapted_linears(config, ["out_proj"], 3)


@pytest.mark.parametrize(
    "shape", [name for name in CONFIGS if "moe" in name or "deepseek" in name or name == "mixtral"]
)
def test_experts_have_adapters_if_named(shape):
    experts = modules(shape, "experts.*")
    assert experts and all(".experts." in name for name in experts)


def test_a_target_is_a_name_or_its_end_or_a_pattern_for_one():
    shape = "qwen3_wide_heads_yarn"
    assert modules(shape, "q_proj") == [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    assert modules(shape, "model.layers.1.mlp.up_proj") == ["model.layers.1.mlp.up_proj"]
    assert modules(shape, "layers.1.self_attn.*") == [name for name in modules(shape, "self_attn.*") if ".1." in name]
    assert modules(shape, "q_proj", "v_proj") == sorted(
        modules(shape, "[qv]_proj"), key=modules(shape, ALL_LINEAR).index
    )


@pytest.mark.parametrize("target", ["proj", "lm_head", "embed_tokens", "*norm*", "mlp.gate", "query"])
def test_a_target_without_a_linear_layer_is_refused_with_the_models_layers(target):
    with pytest.raises(ModelError, match=r"matches no linear layer.*q_proj.*down_proj"):
        adapted_linears(CONFIGS["qwen3_moe"], ["q_proj", target], 3)


@pytest.mark.parametrize("shape", CONFIGS)
def test_a_is_rank_by_inputs_and_b_outputs_by_rank(shape):
    for linear in adapted_linears(CONFIGS[shape], [ALL_LINEAR], 3):
        for (out, inputs), a, b in zip(linear.base.hf.values(), linear.a.shapes, linear.b.shapes, strict=True):
            assert (a, b) == ((3, inputs), (out, 3))


def test_adapters_of_rank_32_are_under_two_percent_of_a_model_of_eight_billion_parameters():
    config = as_config(
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    linears = adapted_linears(config, [ALL_LINEAR], 32)
    shapes = [shape for linear in linears for entry in (linear.a, linear.b) for shape in linear.adapted(entry).values()]
    whole = sum(math.prod(shape) for entry in entries(config, "policy") for shape in entry.hf.values())
    assert 0.01 < sum(math.prod(shape) for shape in shapes) / whole < 0.02
