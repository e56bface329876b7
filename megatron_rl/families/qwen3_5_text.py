"""Qwen3.5, dense, without vision: linear and gated attention."""

from dataclasses import replace

from megatron_rl.families import qwen3_next
from megatron_rl.families.family import JOINED, ModelConfig, Rule, SGLangSupport
from megatron_rl.families.layer_rules import DENSE_MLP, NORMS
from megatron_rl.families.linear_attention import (
    GATED_ATTENTION,
    SEPARATE,
    SERVED_IN_FLOAT32,
    attention_kwargs,
    served_problems,
)
from megatron_rl.families.model_facts import layer_kinds


def _layer(config: ModelConfig, index: int) -> tuple[Rule, ...]:
    return (*NORMS, *(SEPARATE if layer_kinds(config)[index].is_linear else GATED_ATTENTION), *DENSE_MLP)


FAMILY = replace(
    qwen3_next.FAMILY,
    layer=_layer,
    transformer_kwargs=attention_kwargs,
    forbidden={"attention_bias": False},
    experts=None,
    num_mtp_layers="mtp_num_hidden_layers",
    served=SGLangSupport(
        joined={
            **JOINED,
            "in_proj_qkv": ("in_proj_qkvz", 0),
            "in_proj_z": ("in_proj_qkvz", 1),
            "in_proj_b": ("in_proj_ba", 0),
            "in_proj_a": ("in_proj_ba", 1),
        },
        float32=SERVED_IN_FLOAT32,
        problems=served_problems,
    ),
)
