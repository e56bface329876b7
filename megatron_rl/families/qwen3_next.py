"""Qwen3-Next: linear and gated attention, experts with a gated shared expert."""

from typing import Any

from megatron_rl.families.family import Experts, Family, ModelConfig, Rule, SGLangSupport
from megatron_rl.families.layer_rules import DENSE_MLP, EXPERTS, NORMS, gated_mlp, moe_kwargs
from megatron_rl.families.linear_attention import (
    FRESH,
    GATED_ATTENTION,
    INTERLEAVED,
    SERVED_IN_FLOAT32,
    attention_kwargs,
    is_linear,
    served_problems,
    sizes,
)
from megatron_rl.families.model_facts import dims, layer_kinds
from megatron_rl.families.qwen3_moe import NUM_EXPERTS, in_layer
from megatron_rl.families.transforms import Replicated

SHARED_EXPERT = (
    *gated_mlp("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
    Rule("mlp.shared_experts.gate_weight", {"mlp.shared_expert_gate.weight": ("one", "hidden")}, Replicated()),
)


def _layer(config: ModelConfig, index: int) -> tuple[Rule, ...]:
    has_experts, linear = layer_kinds(config)[index]
    attention = INTERLEAVED if linear else GATED_ATTENTION
    return (*NORMS, *attention, *((*EXPERTS, *SHARED_EXPERT) if has_experts else DENSE_MLP))


def expert_kwargs(config: ModelConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for experts with a gated shared expert."""
    return dict(
        moe_kwargs(config),
        moe_shared_expert_intermediate_size=dims(config)["shared_ffn"],
        moe_shared_expert_gate=True,
    )


def _transformer_kwargs(config: ModelConfig) -> dict[str, Any]:
    return attention_kwargs(config) | expert_kwargs(config) | dict(moe_router_pre_softmax=not config.norm_topk_prob)


FAMILY = Family(
    layer=_layer,
    transformer_kwargs=_transformer_kwargs,
    forbidden={"attention_bias": False, "use_sliding_window": False},
    experts=Experts(in_layer=in_layer, number=NUM_EXPERTS),
    takes_partial_rotary=True,
    is_linear=is_linear,
    sizes=sizes,
    fresh=FRESH,
    mtp_prefix="mtp.",
    served=SGLangSupport(
        omitted="self_attn.",
        float32=SERVED_IN_FLOAT32,
        is_sparse_everywhere=True,
        is_never_tied=True,
        problems=served_problems,
    ),
)
