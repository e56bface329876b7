"""Qwen3.5 with experts, without vision, as transformers saves it: one tensor per expert and projection."""

from dataclasses import replace

from megatron_rl.families import qwen3_5_text
from megatron_rl.families.family import Experts, ModelConfig, Rule
from megatron_rl.families.layer_rules import EXPERTS, NORMS
from megatron_rl.families.linear_attention import GATED_ATTENTION, SEPARATE, attention_kwargs
from megatron_rl.families.model_facts import layer_kinds
from megatron_rl.families.qwen3_moe import NUM_EXPERTS
from megatron_rl.families.qwen3_next import SHARED_EXPERT, expert_kwargs


def _layer(config: ModelConfig, index: int) -> tuple[Rule, ...]:
    attention = SEPARATE if layer_kinds(config)[index].is_linear else GATED_ATTENTION
    return (*NORMS, *attention, *EXPERTS, *SHARED_EXPERT)


FAMILY = replace(
    qwen3_5_text.FAMILY,
    layer=_layer,
    transformer_kwargs=lambda config: attention_kwargs(config) | expert_kwargs(config),
    experts=Experts(in_layer=lambda text, index: True, number=NUM_EXPERTS),
)
