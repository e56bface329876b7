"""Llama 2 and 3."""

from megatron_rl.families.blocks import ATTENTION, DENSE_MLP, NORMS
from megatron_rl.families.family import Family

FAMILY = Family(
    layer=lambda config, index: (*NORMS, *ATTENTION, *DENSE_MLP),
    transformer_kwargs=lambda config: {},
    forbidden={"attention_bias": False, "mlp_bias": False},
)
