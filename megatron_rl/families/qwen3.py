"""Qwen3, dense."""

from megatron_rl.families.family import Family
from megatron_rl.families.layer_rules import ATTENTION, DENSE_MLP, NORMS, QK_NORM

FAMILY = Family(
    layer=lambda config, index: (*NORMS, *ATTENTION, *QK_NORM, *DENSE_MLP),
    transformer_kwargs=lambda config: dict(qk_layernorm=True),
    forbidden={"use_sliding_window": False, "attention_bias": False},
)
