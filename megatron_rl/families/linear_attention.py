"""Layers of Qwen3-Next and Qwen3.5: Gated DeltaNet (arXiv 2412.06464), and attention with a gate on its output.

Three of four layers are linear: queries, keys and values pass a short causal convolution, and each value head updates a
state [key dimensions, value dimensions] by the gated delta rule. In the others, a sigmoid of a second query gates each
head's output, and a part of each head rotates. All norms scale by 1 + weight, except the norm of a linear layer's output.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.families.family import ModelConfig, Rule
from megatron_rl.families.layer_rules import QK_NORM
from megatron_rl.families.model_facts import as_config, has_linear_attention, layer_kinds, text_config
from megatron_rl.families.sglang_limits import OTHERWISE, rope_of
from megatron_rl.families.transforms import ColumnParallel, GatedQKV, Replicated, RowParallel, Sections, Transform

GATED_ATTENTION = (
    Rule(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": ("gated_q", "hidden"),
            "self_attn.k_proj.weight": ("kv", "hidden"),
            "self_attn.v_proj.weight": ("kv", "hidden"),
        },
        GatedQKV(),
    ),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "q")}, RowParallel()),
    *QK_NORM,
)
_QKV = ("linear_k", "linear_k", "linear_v")
FRESH = {
    "linear_attn.norm.weight": 1.0,
    "norm.weight": 0.0,
    "linear_attn.dt_bias": 1.0,
    # A state then forgets half of its content in about five tokens.
    "linear_attn.A_log": math.log(0.1),
}
"""Values of a fresh model's vectors."""
SERVED_IN_FLOAT32 = ("linear_attn.A_log",)


def linear_attention(projections: Mapping[str, tuple[str, ...]], *, heads: str = "") -> tuple[Rule, ...]:
    """Rules of a Gated DeltaNet; ``projections``: the files' input projections with their sections, ordered by ``heads``."""
    hf = {f"linear_attn.{name}.weight": (f"{name}_rows", "hidden") for name in projections}
    return (
        Rule("self_attention.in_proj.weight", hf, Sections(tuple(projections.values()), heads)),
        _rule("conv1d.weight", ("linear_qkv", "one", "linear_kernel"), Sections((_QKV,))),
        _rule("dt_bias", ("linear_heads",), ColumnParallel()),
        _rule("A_log", ("linear_heads",), ColumnParallel()),
        Rule("self_attention.out_norm.weight", {"linear_attn.norm.weight": ("linear_value_dim",)}, Replicated()),
        _rule("out_proj.weight", ("hidden", "linear_v"), RowParallel()),
    )


def _rule(name: str, shape: tuple[str, ...], transform: Transform) -> Rule:
    return Rule(f"self_attention.{name}", {f"linear_attn.{name}": shape}, transform)


INTERLEAVED = linear_attention(
    {"in_proj_qkvz": (*_QKV, "linear_v"), "in_proj_ba": ("linear_heads", "linear_heads")}, heads="linear_key_heads"
)
"""A linear layer of Qwen3-Next."""
SEPARATE = linear_attention(
    {
        "in_proj_qkv": _QKV,
        "in_proj_z": ("linear_v",),
        "in_proj_b": ("linear_heads",),
        "in_proj_a": ("linear_heads",),
    }
)
"""A linear layer of Qwen3.5."""


def is_linear(text: ModelConfig, index: int) -> bool:
    """Return whether layer ``index`` has linear attention; ``text`` is the language model's configuration."""
    types = getattr(text, "layer_types", None) or ()
    if index < len(types):
        return types[index] == "linear_attention"
    return (index + 1) % (getattr(text, "full_attention_interval", None) or 4) != 0


def sizes(text: ModelConfig) -> dict[str, int]:
    """Size names of these layers; the defaults are those of transformers, for files that omit a field."""
    heads, key_heads = getattr(text, "linear_num_value_heads", 32), getattr(text, "linear_num_key_heads", 16)
    keys = key_heads * getattr(text, "linear_key_head_dim", 128)
    value_dim = getattr(text, "linear_value_head_dim", 128)
    values, head_dim = heads * value_dim, getattr(text, "head_dim", None) or 256
    return {
        "head_dim": head_dim,
        "q": text.num_attention_heads * head_dim,
        "kv": (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_dim,
        "gated_q": 2 * text.num_attention_heads * head_dim,
        "shared_ffn": getattr(text, "shared_expert_intermediate_size", 0),
        "linear_heads": heads,
        "linear_key_heads": key_heads,
        "linear_key_dim": keys // key_heads,
        "linear_value_dim": value_dim,
        "linear_k": keys,
        "linear_v": values,
        "linear_qkv": 2 * keys + values,
        "linear_kernel": getattr(text, "linear_conv_kernel_dim", 4),
        "in_proj_qkvz_rows": 2 * keys + 2 * values,
        "in_proj_ba_rows": 2 * heads,
        "in_proj_qkv_rows": 2 * keys + values,
        "in_proj_z_rows": values,
        "in_proj_b_rows": heads,
        "in_proj_a_rows": heads,
    }


def served_problems(model: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield a message for each field that SGLang's own configuration of these models reads differently from transformers."""
    text, rope, interval = as_config(model), rope_of(model), model.get("full_attention_interval")
    layers = range(model.get("num_hidden_layers", 0))
    if any(not interval or is_linear(text, index) is not bool((index + 1) % interval) for index in layers):
        yield (
            f"{where}: full_attention_interval={interval}: SGLang's {model['model_type']} reads it instead of layer_types; write one "
            f"that gives the same layers, or {OTHERWISE}"
        )
    for name, default in (("partial_rotary_factor", 0.25), ("rope_theta", 10000.0)):
        served = model.get(name, default)
        if rope.get(name, served) != served:
            yield (
                f"{where}: {name}={rope[name]} in rope_parameters: SGLang's {model['model_type']} takes {served}, from beside "
                f"rope_parameters; write {name}={rope[name]} there too"
            )


def attention_kwargs(config: ModelConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for these layers."""
    kwargs: dict[str, Any] = dict(
        qk_layernorm=True,
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
    )
    if has_linear_attention(config):
        own = sizes(text_config(config))
        kwargs |= dict(
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=[int(kind.is_linear) for kind in layer_kinds(config)],
            linear_conv_kernel_dim=own["linear_kernel"],
            linear_key_head_dim=own["linear_key_dim"],
            linear_value_head_dim=own["linear_value_dim"],
            linear_num_key_heads=own["linear_key_heads"],
            linear_num_value_heads=own["linear_heads"],
        )
    return kwargs
