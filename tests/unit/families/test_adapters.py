"""Targets of adapters: what they match, what is refused, and the shapes of their tensors."""

import pytest

from megatron_rl.errors import ModelError
from megatron_rl.families.adapters import ALL_LINEAR, adapted_linears, linear_modules
from tests.tiny_families import SHAPES, family_config

CONFIGS = {name: family_config(name) for name in SHAPES}


def modules(shape: str, *targets: str) -> list[str]:
    return [module for linear in adapted_linears(CONFIGS[shape], targets, 3) for module in linear.modules]


@pytest.mark.parametrize("shape", CONFIGS)
def test_all_linear_is_every_linear_layer_but_those_of_routed_experts(shape):
    expected = [name for name in linear_modules(CONFIGS[shape]) if ".experts." not in name]
    assert modules(shape, ALL_LINEAR) == expected and expected
    assert not any(word in name for name in expected for word in ("norm", "mlp.gate.", "embed", "lm_head"))


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
