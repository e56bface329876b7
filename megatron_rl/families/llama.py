"""Llama 2 and 3."""

from megatron_rl.families.family import Family
from megatron_rl.families.layer_rules import ATTENTION, DENSE_MLP, NORMS

FAMILY = Family(
    layer=lambda config, index: (*NORMS, *ATTENTION, *DENSE_MLP),
    transformer_kwargs=lambda config: {},
    forbidden={"attention_bias": False, "mlp_bias": False},
)
