"""Qwen3.5, dense, without vision: linear and gated attention."""

from megatron_rl.families.family import JOINED, Family, ModelConfig, Rule, SGLangSupport
from megatron_rl.families.layer_rules import DENSE_MLP, NORMS
from megatron_rl.families.linear_attention import (
    FRESH,
    GATED_ATTENTION,
    SEPARATE,
    attention_kwargs,
    is_linear,
    served_problems,
    sizes,
)
from megatron_rl.families.model_facts import layer_kinds


def _layer(config: ModelConfig, index: int) -> tuple[Rule, ...]:
    return (*NORMS, *(SEPARATE if layer_kinds(config)[index].is_linear else GATED_ATTENTION), *DENSE_MLP)


FAMILY = Family(
    layer=_layer,
    transformer_kwargs=attention_kwargs,
    forbidden={"attention_bias": False},
    takes_partial_rotary=True,
    layer_types=("full_attention", "linear_attention"),
    is_linear=is_linear,
    sizes=sizes,
    fresh=FRESH,
    num_mtp_layers="mtp_num_hidden_layers",
    mtp_prefix="mtp.",
    served=SGLangSupport(
        joined={
            **JOINED,
            "in_proj_qkv": ("in_proj_qkvz", 0),
            "in_proj_z": ("in_proj_qkvz", 1),
            "in_proj_b": ("in_proj_ba", 0),
            "in_proj_a": ("in_proj_ba", 1),
        },
        problems=served_problems,
    ),
)
