"""Model families as tables: which Megatron parameter is which Hugging Face tensors, of which shape, by which transform.

A new family is a new entry of ``FAMILIES``: its rules, and what its configuration means to Megatron. Shapes are names
of sizes (``dims``), so that a table can be read and every tensor of a checkpoint can be checked before it is used.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PretrainedConfig

from megatron_rl.models.hf.transforms import QKV, Columns, Dims, GatedMLP, Replicated, Transform, Vocabulary

Role = Literal["policy", "critic"]
VALUE_HEAD = "value_head.weight"
"""The critic's value head, under one name in Megatron's place (output_layer.weight) and in files."""


@dataclass(frozen=True)
class Rule:
    megatron: str
    """Parameter name; inside a layer without the prefix ``decoder.layers.N.``; ``{expert}`` for each expert."""
    hf: Mapping[str, tuple[str, ...]]
    """Hugging Face names, inside a layer without ``model.layers.N.``, and shapes by names of sizes."""
    transform: Transform


@dataclass(frozen=True)
class Entry:
    """A rule for one parameter of the whole model: all indices and sizes filled in."""

    megatron: str
    hf: dict[str, tuple[int, ...]]
    transform: Transform


@dataclass(frozen=True)
class Family:
    layer: tuple[Rule, ...]
    """Rules of one decoder layer."""
    transformer_kwargs: Callable[[PretrainedConfig], dict[str, Any]]
    """What this family adds to Megatron's TransformerConfig."""
    forbidden: Mapping[str, Any]
    """Configuration fields that must be absent or equal to this value: other values are not implemented."""


NORMS = (
    Rule("input_layernorm.weight", {"input_layernorm.weight": ("hidden",)}, Replicated()),
    Rule("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": ("hidden",)}, Replicated()),
)
ATTENTION = (
    Rule(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": ("q", "hidden"),
            "self_attn.k_proj.weight": ("kv", "hidden"),
            "self_attn.v_proj.weight": ("kv", "hidden"),
        },
        QKV(),
    ),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "q")}, Columns()),
)
QKV_BIAS = (
    Rule(
        "self_attention.linear_qkv.bias",
        {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
        QKV(),
    ),
)
QK_NORM = (
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head_dim",)}, Replicated()),
    Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head_dim",)}, Replicated()),
)
DENSE_MLP = (
    Rule(
        "mlp.linear_fc1.weight",
        {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
        GatedMLP(),
    ),
    Rule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": ("hidden", "ffn")}, Columns()),
)


def _expert_mlp(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    expert = f"{prefix}.experts.{{expert}}"
    return (
        Rule("mlp.router.weight", {f"{prefix}.gate.weight": ("experts", "hidden")}, Replicated()),
        Rule(
            "mlp.experts.{expert}.linear_fc1.weight",
            {f"{expert}.{gate}.weight": ("expert_ffn", "hidden"), f"{expert}.{up}.weight": ("expert_ffn", "hidden")},
            GatedMLP(),
        ),
        Rule(
            "mlp.experts.{expert}.linear_fc2.weight",
            {f"{expert}.{down}.weight": ("hidden", "expert_ffn")},
            Columns(),
        ),
    )


def _moe_kwargs(config: PretrainedConfig) -> dict[str, Any]:
    sizes = dims(config)
    return dict(
        num_moe_experts=sizes["experts"],
        moe_ffn_hidden_size=sizes["expert_ffn"],
        moe_router_topk=config.num_experts_per_tok,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
    )


def _qwen3_moe_kwargs(config: PretrainedConfig) -> dict[str, Any]:
    return dict(_moe_kwargs(config), qk_layernorm=True, moe_router_pre_softmax=not config.norm_topk_prob)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        layer=(*NORMS, *ATTENTION, *DENSE_MLP),
        transformer_kwargs=lambda config: {},
        forbidden={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Family(
        layer=(*NORMS, *ATTENTION, *QKV_BIAS, *DENSE_MLP),
        transformer_kwargs=lambda config: dict(add_qkv_bias=True),
        forbidden={"use_sliding_window": False},
    ),
    "qwen3": Family(
        layer=(*NORMS, *ATTENTION, *QK_NORM, *DENSE_MLP),
        transformer_kwargs=lambda config: dict(qk_layernorm=True),
        forbidden={"use_sliding_window": False, "attention_bias": False},
    ),
    "qwen3_moe": Family(
        layer=(*NORMS, *ATTENTION, *QK_NORM, *_expert_mlp("mlp", "gate_proj", "up_proj", "down_proj")),
        transformer_kwargs=_qwen3_moe_kwargs,
        forbidden={
            "use_sliding_window": False,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "mixtral": Family(
        layer=(*NORMS, *ATTENTION, *_expert_mlp("block_sparse_moe", "w1", "w3", "w2")),
        transformer_kwargs=lambda config: dict(_moe_kwargs(config), moe_router_pre_softmax=False),
        forbidden={"sliding_window": None},
    ),
}
EMBEDDING = Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocab", "hidden")}, Vocabulary())
FINAL_NORM = Rule("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, Replicated())
LM_HEAD = Rule("output_layer.weight", {"lm_head.weight": ("vocab", "hidden")}, Vocabulary())
VALUE_OUTPUT = Rule("output_layer.weight", {VALUE_HEAD: ("one", "hidden")}, Replicated())


def dims(config: PretrainedConfig) -> Dims:
    """The sizes that tables name."""
    heads = config.num_attention_heads
    # Optional in the files of every family: transformers leaves them out where they follow from the others.
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    return {
        "one": 1,
        "hidden": config.hidden_size,
        "heads": heads,
        "groups": groups,
        "head_dim": head_dim,
        "q": heads * head_dim,
        "kv": groups * head_dim,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "experts": experts,
        "expert_ffn": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
    }


def family_of(config: PretrainedConfig) -> Family:
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[config.model_type]


def entries(config: PretrainedConfig, role: Role) -> list[Entry]:
    """Every parameter of the whole model, in the order of Hugging Face files: embedding, layers, norm, head."""
    sizes = dims(config)
    rules = [_fill(EMBEDDING, sizes)]
    for layer in range(config.num_hidden_layers):
        for rule in family_of(config).layer:
            experts = range(sizes["experts"]) if "{expert}" in rule.megatron else [0]
            rules.extend(
                _fill(rule, sizes, f"decoder.layers.{layer}.", f"model.layers.{layer}.", expert) for expert in experts
            )
    rules.append(_fill(FINAL_NORM, sizes))
    if role == "critic":
        rules.append(_fill(VALUE_OUTPUT, sizes))
    elif not config.tie_word_embeddings:
        rules.append(_fill(LM_HEAD, sizes))
    return rules


def _fill(rule: Rule, sizes: Dims, megatron_prefix: str = "", hf_prefix: str = "", expert: int = 0) -> Entry:
    return Entry(
        megatron=megatron_prefix + rule.megatron.format(expert=expert),
        hf={hf_prefix + name.format(expert=expert): tuple(sizes[d] for d in shape) for name, shape in rule.hf.items()},
        transform=rule.transform,
    )


_OTHER_SPELLINGS = (
    # Transformer Engine folds a norm into the linear layer after it ...
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    # ... and its grouped linear layers number the experts at the end; Megatron's own keep a list of them.
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.\2.\1.weight"),
    (re.compile(r"mlp\.experts\.local_experts\."), "mlp.experts."),
)


def canonical_name(name: str) -> str:
    """A Megatron parameter's name as the tables spell it, whichever layer implementation it comes from."""
    for pattern, replacement in _OTHER_SPELLINGS:
        name = pattern.sub(replacement, name)
    return name
