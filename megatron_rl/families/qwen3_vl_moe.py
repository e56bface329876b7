"""Qwen3-VL with experts, which its files store stacked: one tensor for all experts of a layer."""

from megatron_rl.families.family import Experts, Family, ModelConfig, Rule, SGLangSupport
from megatron_rl.families.layer_rules import ATTENTION, DENSE_MLP, NORMS, QK_NORM, STACKED_DOWN, moe_kwargs
from megatron_rl.families.model_facts import has_experts
from megatron_rl.families.qwen3_moe import NUM_EXPERTS, in_layer
from megatron_rl.families.qwen3_vl import VISION
from megatron_rl.families.transforms import GatedMLP, Replicated, Transposed
from megatron_rl.families.vision_encoder import VISION_KWARGS

_STACKED_EXPERTS = (
    Rule("mlp.router.weight", {"mlp.gate.weight": ("experts", "hidden")}, Replicated()),
    Rule(
        "mlp.experts.{expert}.linear_fc1.weight",
        {"mlp.experts.gate_up_proj": ("experts", "hidden", "expert_gate_up")},
        Transposed(GatedMLP(), halves=True),
        is_stacked=True,
    ),
    STACKED_DOWN,
)


def _layer(config: ModelConfig, index: int) -> tuple[Rule, ...]:
    return (*NORMS, *ATTENTION, *QK_NORM, *(_STACKED_EXPERTS if has_experts(config)[index] else DENSE_MLP))


FAMILY = Family(
    layer=_layer,
    transformer_kwargs=lambda config: dict(moe_kwargs(config), **VISION_KWARGS, qk_layernorm=True),
    forbidden={"attention_bias": False},
    experts=Experts(in_layer=in_layer, number=NUM_EXPERTS),
    vision=VISION,
    served=SGLangSupport(is_sparse_everywhere=True),
)
