"""Model families as tables: which Megatron parameter is which Hugging Face tensors, of which shape, by which transform.

A new family is a new entry of ``FAMILIES``: its rules, and what its configuration means to Megatron. Shapes are names
of sizes (``dims``), so that a table can be read and every tensor of a checkpoint can be checked before it is used.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PretrainedConfig

from megatron_rl.families.transforms import (
    QKV,
    Columns,
    Dims,
    GatedMLP,
    Replicated,
    Rows,
    Transform,
    Transposed,
    Vocabulary,
)
from megatron_rl.families.vision_shapes import parameter_shapes

Role = Literal["policy", "critic"]
VALUE_HEAD = "value_head.weight"
"""The critic's value head, under one name in Megatron's place (output_layer.weight) and in files."""


@dataclass(frozen=True)
class _Rule:
    megatron: str
    """Parameter name; inside a layer without the prefix ``decoder.layers.N.``; ``{expert}`` for each expert."""
    hf: Mapping[str, tuple[str, ...]]
    """Hugging Face names, inside a layer without ``model.layers.N.``, and shapes by names of sizes."""
    transform: Transform
    is_stacked: bool = False
    """The tensors hold all experts, along their first dimension; the transform takes one expert's part."""


@dataclass(frozen=True)
class Entry:
    """A rule for one parameter of the whole model: all indices and sizes filled in."""

    megatron: str
    hf: dict[str, tuple[int, ...]]
    """Whole tensors' names and shapes."""
    transform: Transform
    part: tuple[int, int] | None = None
    """(index, count): it is this one of so many parts of its tensors, along their first dimension. Parts of one tensor
    follow one another."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """What the transform takes and gives: the shapes of whole tensors, or of its parts of them."""
        return [shape if self.part is None else shape[1:] for shape in self.hf.values()]


@dataclass(frozen=True)
class _VisionNames:
    """How files of a vision-language model begin the names of its tensors."""

    encoder: str
    text: str


@dataclass(frozen=True)
class Family:
    layer: Callable[[PretrainedConfig, int], tuple[_Rule, ...]]
    """Rules of one decoder layer, by its index."""
    transformer_kwargs: Callable[[PretrainedConfig], dict[str, Any]]
    """What this family adds to Megatron's TransformerConfig."""
    forbidden: Mapping[str, Any]
    """Configuration fields that must be absent or equal to this value: other values are not implemented."""
    is_latent: bool = False
    """Multi-head latent attention (MLA) instead of grouped-query attention."""
    takes_partial_rotary: bool = False
    """Whether ``partial_rotary_factor`` means something to this family; to the others it is unknown."""
    vision: _VisionNames | None = None
    """Of a vision-language model: its configuration holds the language model's as ``text_config``."""


_NORMS = (
    _Rule("input_layernorm.weight", {"input_layernorm.weight": ("hidden",)}, Replicated()),
    _Rule("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": ("hidden",)}, Replicated()),
)
_ATTENTION = (
    _Rule(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": ("q", "hidden"),
            "self_attn.k_proj.weight": ("kv", "hidden"),
            "self_attn.v_proj.weight": ("kv", "hidden"),
        },
        QKV(),
    ),
    _Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "q")}, Columns()),
)
_QKV_BIAS = (
    _Rule(
        "self_attention.linear_qkv.bias",
        {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
        QKV(),
    ),
)
_QK_NORM = (
    _Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head_dim",)}, Replicated()),
    _Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head_dim",)}, Replicated()),
)
_LATENT_QUERY = (
    _Rule(
        "self_attention.linear_q_down_proj.weight", {"self_attn.q_a_proj.weight": ("q_latent", "hidden")}, Replicated()
    ),
    _Rule("self_attention.q_layernorm.weight", {"self_attn.q_a_layernorm.weight": ("q_latent",)}, Replicated()),
    _Rule("self_attention.linear_q_up_proj.weight", {"self_attn.q_b_proj.weight": ("q", "q_latent")}, Rows()),
)
_PLAIN_QUERY = (_Rule("self_attention.linear_q_proj.weight", {"self_attn.q_proj.weight": ("q", "hidden")}, Rows()),)
_LATENT_KEY_VALUE = (
    _Rule(
        "self_attention.linear_kv_down_proj.weight",
        {"self_attn.kv_a_proj_with_mqa.weight": ("kv_down", "hidden")},
        Replicated(),
    ),
    _Rule("self_attention.kv_layernorm.weight", {"self_attn.kv_a_layernorm.weight": ("kv_latent",)}, Replicated()),
    _Rule("self_attention.linear_kv_up_proj.weight", {"self_attn.kv_b_proj.weight": ("kv_up", "kv_latent")}, Rows()),
    _Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "attended")}, Columns()),
)


def _gated_mlp(megatron: str, hf: str, size: str) -> tuple[_Rule, ...]:
    return (
        _Rule(
            f"{megatron}.linear_fc1.weight",
            {f"{hf}.gate_proj.weight": (size, "hidden"), f"{hf}.up_proj.weight": (size, "hidden")},
            GatedMLP(),
        ),
        _Rule(f"{megatron}.linear_fc2.weight", {f"{hf}.down_proj.weight": ("hidden", size)}, Columns()),
    )


_DENSE_MLP = _gated_mlp("mlp", "mlp", "ffn")
_SHARED_EXPERTS = _gated_mlp("mlp.shared_experts", "mlp.shared_experts", "shared_ffn")
_EXPERT_BIAS = (_Rule("mlp.router.expert_bias", {"mlp.gate.e_score_correction_bias": ("experts",)}, Replicated()),)


def _expert_mlp(prefix: str, gate: str, up: str, down: str) -> tuple[_Rule, ...]:
    expert = f"{prefix}.experts.{{expert}}"
    return (
        _Rule("mlp.router.weight", {f"{prefix}.gate.weight": ("experts", "hidden")}, Replicated()),
        _Rule(
            "mlp.experts.{expert}.linear_fc1.weight",
            {f"{expert}.{gate}.weight": ("expert_ffn", "hidden"), f"{expert}.{up}.weight": ("expert_ffn", "hidden")},
            GatedMLP(),
        ),
        _Rule(
            "mlp.experts.{expert}.linear_fc2.weight",
            {f"{expert}.{down}.weight": ("hidden", "expert_ffn")},
            Columns(),
        ),
    )


EXPERTS = _expert_mlp("mlp", "gate_proj", "up_proj", "down_proj")
_STACKED_EXPERTS = (
    _Rule("mlp.router.weight", {"mlp.gate.weight": ("experts", "hidden")}, Replicated()),
    _Rule(
        "mlp.experts.{expert}.linear_fc1.weight",
        {"mlp.experts.gate_up_proj": ("experts", "hidden", "expert_gate_up")},
        Transposed(GatedMLP(), halves=True),
        is_stacked=True,
    ),
    _Rule(
        "mlp.experts.{expert}.linear_fc2.weight",
        {"mlp.experts.down_proj": ("experts", "expert_ffn", "hidden")},
        Transposed(Columns()),
        is_stacked=True,
    ),
)
_MIXTRAL_EXPERTS = _expert_mlp("block_sparse_moe", "w1", "w3", "w2")
BIASED_EXPERTS = (*EXPERTS, *_EXPERT_BIAS, *_SHARED_EXPERTS)


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a model's configuration that describes its language model: all of it, or a nested one."""
    return config.text_config if sees(config) else config


def sees(config: PretrainedConfig) -> bool:
    """Whether the model takes images."""
    return family_of(config).vision is not None


def has_experts(config: PretrainedConfig) -> list[bool]:
    """For each decoder layer, whether it is a mixture of experts; all False in a dense model."""
    model_type, config = config.model_type, text_config(config)
    layers = range(config.num_hidden_layers)
    if model_type == "mixtral":
        return [True for _ in layers]
    if model_type in ("qwen3_moe", "qwen3_vl_moe"):
        step, dense = config.decoder_sparse_step, config.mlp_only_layers or []
        return [config.num_experts > 0 and i not in dense and (i + 1) % step == 0 for i in layers]
    if model_type in ("deepseek_v3", "glm4_moe"):
        return [i >= config.first_k_dense_replace for i in layers]
    return [False for _ in layers]


def router_groups(config: PretrainedConfig) -> tuple[int, int]:
    """(groups of experts, how many of them a token's experts may come from); one group where there are none."""
    return getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1


def _qwen3_moe_layer(config: PretrainedConfig, index: int) -> tuple[_Rule, ...]:
    experts = _STACKED_EXPERTS if sees(config) else EXPERTS
    return (*_NORMS, *_ATTENTION, *_QK_NORM, *(experts if has_experts(config)[index] else _DENSE_MLP))


def _deepseek_v3_layer(config: PretrainedConfig, index: int) -> tuple[_Rule, ...]:
    query = _PLAIN_QUERY if config.q_lora_rank is None else _LATENT_QUERY
    mlp = BIASED_EXPERTS if has_experts(config)[index] else _DENSE_MLP
    return (*_NORMS, *query, *_LATENT_KEY_VALUE, *mlp)


def _glm4_moe_layer(config: PretrainedConfig, index: int) -> tuple[_Rule, ...]:
    bias = _QKV_BIAS if config.attention_bias else ()
    norm = _QK_NORM if config.use_qk_norm else ()
    mlp = BIASED_EXPERTS if has_experts(config)[index] else _DENSE_MLP
    return (*_NORMS, *_ATTENTION, *bias, *norm, *mlp)


def _moe_kwargs(config: PretrainedConfig) -> dict[str, Any]:
    sizes, moe_layers = dims(config), has_experts(config)
    kwargs = dict(
        num_moe_experts=sizes["experts"],
        moe_ffn_hidden_size=sizes["expert_ffn"],
        moe_router_topk=text_config(config).num_experts_per_tok,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
    )
    if not all(moe_layers):
        kwargs["moe_layer_freq"] = [int(is_moe) for is_moe in moe_layers]
    return kwargs


def _qwen3_moe_kwargs(config: PretrainedConfig) -> dict[str, Any]:
    return dict(_moe_kwargs(config), qk_layernorm=True, moe_router_pre_softmax=not config.norm_topk_prob)


# The fused kernel knows one position a token.
_VISION_KWARGS = dict(apply_rope_fusion=False)


def _biased_router_kwargs(config: PretrainedConfig) -> dict[str, Any]:
    """The router of DeepSeek-V3: sigmoid scores, a bias for the choice alone, the choice limited to some groups."""
    groups, chosen_groups = router_groups(config)
    limits_groups = chosen_groups < groups
    return dict(
        _moe_kwargs(config),
        moe_shared_expert_intermediate_size=dims(config)["shared_ffn"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_num_groups=groups if limits_groups else None,
        moe_router_group_topk=chosen_groups if limits_groups else None,
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
    )


def _deepseek_v3_kwargs(config: PretrainedConfig) -> dict[str, Any]:
    return dict(
        _biased_router_kwargs(config),
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_nope_head_dim,
        qk_pos_emb_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        # The fused kernel computes its own frequencies.
        apply_rope_fusion=False,
    )


def _glm4_moe_kwargs(config: PretrainedConfig) -> dict[str, Any]:
    return dict(
        _biased_router_kwargs(config), add_qkv_bias=bool(config.attention_bias), qk_layernorm=bool(config.use_qk_norm)
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(
        layer=lambda config, index: (*_NORMS, *_ATTENTION, *_DENSE_MLP),
        transformer_kwargs=lambda config: {},
        forbidden={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Family(
        layer=lambda config, index: (*_NORMS, *_ATTENTION, *_QKV_BIAS, *_DENSE_MLP),
        transformer_kwargs=lambda config: dict(add_qkv_bias=True),
        forbidden={"use_sliding_window": False},
    ),
    "qwen3": Family(
        layer=lambda config, index: (*_NORMS, *_ATTENTION, *_QK_NORM, *_DENSE_MLP),
        transformer_kwargs=lambda config: dict(qk_layernorm=True),
        forbidden={"use_sliding_window": False, "attention_bias": False},
    ),
    "qwen3_moe": Family(
        layer=_qwen3_moe_layer,
        transformer_kwargs=_qwen3_moe_kwargs,
        forbidden={"use_sliding_window": False, "attention_bias": False},
    ),
    "mixtral": Family(
        layer=lambda config, index: (*_NORMS, *_ATTENTION, *_MIXTRAL_EXPERTS),
        transformer_kwargs=lambda config: dict(_moe_kwargs(config), moe_router_pre_softmax=False),
        forbidden={"sliding_window": None},
    ),
    "deepseek_v3": Family(
        layer=_deepseek_v3_layer,
        transformer_kwargs=_deepseek_v3_kwargs,
        forbidden={
            "attention_bias": False,
            "rope_interleave": True,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            # transformers computes the norms of the latents with this constant, whatever the field says.
            "rms_norm_eps": 1e-6,
        },
        is_latent=True,
    ),
    "glm4_moe": Family(
        layer=_glm4_moe_layer,
        transformer_kwargs=_glm4_moe_kwargs,
        forbidden={"norm_topk_prob": True},
        takes_partial_rotary=True,
    ),
    "qwen2_5_vl": Family(
        layer=lambda config, index: (*_NORMS, *_ATTENTION, *_QKV_BIAS, *_DENSE_MLP),
        transformer_kwargs=lambda config: dict(_VISION_KWARGS, add_qkv_bias=True),
        forbidden={"use_sliding_window": False},
        vision=_VisionNames(encoder="visual.", text="model."),
    ),
    "qwen3_vl": Family(
        layer=lambda config, index: (*_NORMS, *_ATTENTION, *_QK_NORM, *_DENSE_MLP),
        transformer_kwargs=lambda config: dict(_VISION_KWARGS, qk_layernorm=True),
        forbidden={"attention_bias": False},
        vision=_VisionNames(encoder="model.visual.", text="model.language_model."),
    ),
    "qwen3_vl_moe": Family(
        layer=_qwen3_moe_layer,
        transformer_kwargs=lambda config: dict(_moe_kwargs(config), **_VISION_KWARGS, qk_layernorm=True),
        forbidden={"attention_bias": False},
        vision=_VisionNames(encoder="model.visual.", text="model.language_model."),
    ),
}
_EMBEDDING = _Rule("embedding.word_embeddings.weight", {"embed_tokens.weight": ("vocab", "hidden")}, Vocabulary())
_FINAL_NORM = _Rule("decoder.final_layernorm.weight", {"norm.weight": ("hidden",)}, Replicated())
_LM_HEAD = _Rule("output_layer.weight", {"lm_head.weight": ("vocab", "hidden")}, Vocabulary())
_VALUE_OUTPUT = _Rule("output_layer.weight", {VALUE_HEAD: ("one", "hidden")}, Replicated())


def dims(config: PretrainedConfig) -> Dims:
    """The sizes that tables name."""
    whole, config = config, text_config(config)
    heads = config.num_attention_heads
    # Optional in the files of every family: transformers leaves them out where they follow from the others.
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    expert_ffn = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    sizes = {
        "one": 1,
        "hidden": config.hidden_size,
        "heads": heads,
        "groups": groups,
        "head_dim": head_dim,
        "q": heads * head_dim,
        "kv": groups * head_dim,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "experts": experts if any(has_experts(whole)) else 0,
        "expert_ffn": expert_ffn,
        "expert_gate_up": 2 * expert_ffn,
        "shared_ffn": expert_ffn * getattr(config, "n_shared_experts", 0),
    }
    if family_of(whole).is_latent:
        content, position = config.qk_nope_head_dim, config.qk_rope_head_dim
        sizes |= {
            "head_dim": content + position,
            "q": heads * (content + position),
            "q_latent": config.q_lora_rank or 0,
            "kv_latent": config.kv_lora_rank,
            "kv_down": config.kv_lora_rank + position,
            "kv_up": heads * (content + config.v_head_dim),
            "attended": heads * config.v_head_dim,
        }
    return sizes


def family_of(config: PretrainedConfig) -> Family:
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[config.model_type]


def entries(config: PretrainedConfig, role: Role) -> list[Entry]:
    """Every parameter of the whole model, in the order of Hugging Face files: encoder, embedding, layers, norm, head."""
    sizes, family = dims(config), family_of(config)
    rules, text = [], "model."
    if family.vision is not None:
        text = family.vision.text
        for name, shape in parameter_shapes(config.vision_config).items():
            rules.append(Entry(f"vision.{name}", {family.vision.encoder + name: shape}, Replicated()))
    rules.append(_fill(_EMBEDDING, sizes, hf_prefix=text))
    for layer in range(text_config(config).num_hidden_layers):
        for rule in family.layer(config, layer):
            experts = range(sizes["experts"]) if "{expert}" in rule.megatron else [0]
            rules.extend(
                _fill(rule, sizes, f"decoder.layers.{layer}.", f"{text}layers.{layer}.", expert) for expert in experts
            )
    rules.append(_fill(_FINAL_NORM, sizes, hf_prefix=text))
    if role == "critic":
        rules.append(_fill(_VALUE_OUTPUT, sizes))
    elif not config.tie_word_embeddings:
        rules.append(_fill(_LM_HEAD, sizes))
    return rules


def stacked_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that hold all experts of a layer, with their shapes in the hub's files; none in most families."""
    stacked = (entry for entry in entries(config, "policy") if entry.part is not None)
    return {name: shape for entry in stacked for name, shape in entry.hf.items()}


def _fill(rule: _Rule, sizes: Dims, megatron_prefix: str = "", hf_prefix: str = "", expert: int = 0) -> Entry:
    return Entry(
        megatron=megatron_prefix + rule.megatron.format(expert=expert),
        hf={hf_prefix + name.format(expert=expert): tuple(sizes[d] for d in shape) for name, shape in rule.hf.items()},
        transform=rule.transform,
        part=(expert, sizes["experts"]) if rule.is_stacked else None,
    )


_OTHER_SPELLINGS = (
    # Transformer Engine folds a norm into the linear layer after it ...
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (
        re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$"),
        r"self_attention.\1_layernorm.\2",
    ),
    # ... and its grouped linear layers number the experts at the end; Megatron's own keep a list of them.
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.\2.\1.weight"),
    (re.compile(r"mlp\.experts\.local_experts\."), "mlp.experts."),
)


def canonical_name(name: str) -> str:
    """A Megatron parameter's name as the tables spell it, whichever layer implementation it comes from."""
    for pattern, replacement in _OTHER_SPELLINGS:
        name = pattern.sub(replacement, name)
    return name
