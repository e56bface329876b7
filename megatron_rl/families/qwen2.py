"""Qwen2 and Qwen2.5."""

from megatron_rl.families.family import Family
from megatron_rl.families.layer_rules import ATTENTION, DENSE_MLP, NORMS, QKV_BIAS

FAMILY = Family(
    layer=lambda config, index: (*NORMS, *ATTENTION, *QKV_BIAS, *DENSE_MLP),
    transformer_kwargs=lambda config: dict(add_qkv_bias=True),
    forbidden={"use_sliding_window": False},
)
