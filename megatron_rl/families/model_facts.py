"""Reads a model's config.json, and derives the facts that many modules need from it.

A configuration is read by attributes: transformers' PretrainedConfig, or the file itself (``as_config``), which may
omit fields that have a default in transformers.

The fields of config.json are checked one by one: types, signs and plausible sizes, independent of the model. The
check comes before any computation, so that an impossible file is reported by its field. Absent fields, and null for
optional fields, pass.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

from megatron_rl.errors import ModelError
from megatron_rl.families.family import ModelConfig, families, family_of

_MAX_SIZE = 2**31
_MAX_LAYERS = 1000
_MAX_EXPERTS = 10_000
_MAX_EXPERTS_OF_ALL_LAYERS = 500_000
"""Limit for the whole model, because each expert of each layer has its own entries in the tables."""
_MAX_SHOWN = 60

Check = tuple[str, Callable[[Any], bool]]
"""(the expected value as text, function that returns True for a valid value)."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 and math.isfinite(value)


def _whole(least: int, most: int = _MAX_SIZE) -> Check:
    return f"a whole number from {least} to {most}", lambda value: _is_whole(value) and least <= value <= most


def _number(expected: str, holds: Callable[[Any], bool]) -> Check:
    return expected, lambda value: _is_number(value) and holds(value)


_POSITIVE = _number("a number above 0", lambda value: value > 0)
_NOT_NEGATIVE = _number("a number of at least 0", lambda value: value >= 0)
_SHARE = _number("a number above 0 and up to 1", lambda value: 0 < value <= 1)
_TRUTH: Check = ("true or false", lambda value: isinstance(value, bool))
_TEXT: Check = ("text", lambda value: isinstance(value, str))
_OBJECT: Check = ("an object", lambda value: isinstance(value, dict))
_INDICES: Check = (
    "a list of whole numbers of at least 0",
    lambda value: isinstance(value, list) and all(_is_whole(x) and 0 <= x <= _MAX_SIZE for x in value),
)
_TEXTS: Check = (
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value),
)
_FACTORS: Check = (
    "a number above 0, or a list of them",
    lambda value: (isinstance(value, list) and all(_POSITIVE[1](x) for x in value)) or _POSITIVE[1](value),
)

_REQUIRED: Mapping[str, Check] = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"), _whole(1)),
    "max_position_embeddings": _whole(1),
    "num_hidden_layers": _whole(1, _MAX_LAYERS),
    "num_experts_per_tok": _whole(1, _MAX_EXPERTS),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _whole(1)),
    **dict.fromkeys(("moe_intermediate_size", "decoder_sparse_step"), _whole(1)),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"), _whole(1)),
    **dict.fromkeys(("linear_value_head_dim", "linear_conv_kernel_dim", "shared_expert_intermediate_size"), _whole(1)),
    "rms_norm_eps": _number("a number above 0 and below 1", lambda value: 0 < value < 1),
    **dict.fromkeys(("routed_scaling_factor", "swiglu_limit", "swiglu_alpha"), _POSITIVE),
    "initializer_range": _NOT_NEGATIVE,
    "hidden_act": _TEXT,
    "attention_dropout": _number("a number from 0 up to but not including 1", lambda value: 0 <= value < 1),
    **dict.fromkeys(("image_token_id", "video_token_id"), _whole(0)),
}
"""Fields that must not be null if present."""
_OPTIONAL: Mapping[str, Check] = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "q_lora_rank", "sliding_window"), _whole(1)),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), _whole(0, _MAX_EXPERTS)),
    **dict.fromkeys(("n_group", "topk_group"), _whole(0, _MAX_EXPERTS)),
    "n_shared_experts": _whole(0, _MAX_EXPERTS),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), _whole(0, _MAX_LAYERS)),
    "max_window_layers": _whole(0),
    **dict.fromkeys(("vision_start_token_id", "vision_end_token_id"), _whole(0)),
    "rope_theta": _POSITIVE,
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window", "use_qk_norm"),
        _TRUTH,
    ),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "text_config", "vision_config", "quantization_config"), _OBJECT),
    **dict.fromkeys(("torch_dtype", "dtype", "scoring_func", "topk_method"), _TEXT),
    "mlp_only_layers": _INDICES,
    "layer_types": _TEXTS,
    "partial_rotary_factor": _SHARE,
    "full_attention_interval": _whole(1),
    "mtp_num_hidden_layers": _whole(0, _MAX_LAYERS),
}
_ROPE: Mapping[str, Check] = {
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings"), _POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "attention_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attn_factor"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _NOT_NEGATIVE),
    **dict.fromkeys(("short_factor", "long_factor"), _FACTORS),
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "mrope_section": _INDICES,
    "mrope_interleaved": _TRUTH,
    "truncate": _TRUTH,
    "partial_rotary_factor": _SHARE,
}
_VISION: Mapping[str, Check] = {
    "depth": _whole(1, _MAX_LAYERS),
    **dict.fromkeys(("hidden_size", "num_heads", "intermediate_size", "out_hidden_size"), _whole(1)),
    **dict.fromkeys(("patch_size", "temporal_patch_size", "spatial_merge_size", "in_channels", "in_chans"), _whole(1)),
    **dict.fromkeys(("num_position_embeddings", "window_size", "tokens_per_second"), _whole(1)),
    **dict.fromkeys(("fullatt_block_indexes", "deepstack_visual_indexes"), _INDICES),
    "hidden_act": _TEXT,
}
_INSIDE: Mapping[str, Mapping[str, Check]] = {
    "rope_parameters": _ROPE,
    "rope_scaling": _ROPE,
    "text_config": {**_REQUIRED, **_OPTIONAL},
    "vision_config": _VISION,
}


def field_problems(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message per field of config.json with an impossible value."""
    yield from _problems("", model, {**_REQUIRED, **_OPTIONAL})
    texts: dict[str, Any] = {"": dict(model), "text_config.": model.get("text_config")}
    for prefix, text in texts.items():
        if isinstance(text, dict):
            layers, experts = _count(text, "num_hidden_layers"), max(_count(text, name) for name in _EXPERT_COUNTS)
            if layers * experts > _MAX_EXPERTS_OF_ALL_LAYERS:
                yield f"{prefix}num_hidden_layers {layers} with {experts} experts: expected at most {_MAX_EXPERTS_OF_ALL_LAYERS} in all"


_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")


def _problems(prefix: str, values: Mapping[str, Any], checks: Mapping[str, Check]) -> Iterator[str]:
    for name, (expected, holds) in checks.items():
        value: Any = values.get(name)
        if name not in values or (value is None and name not in _REQUIRED):
            continue
        if not holds(value):
            text = "null" if value is None else repr(value)
            text = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
            yield f"{prefix}{name}: expected {expected}, got {text}"
        elif name in _INSIDE and not prefix.startswith("vision_config"):
            yield from _problems(f"{prefix}{name}.", value, _INSIDE[name])


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return int(value or 0) if _is_whole(value) else 0


_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_MAX_CACHED = 20_000


class _Facts(SimpleNamespace):
    """Fields of a config.json, which cannot be set."""

    __slots__ = ("_content",)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: these are a file's fields, and caches name them by their content; make other ones by as_config")

    @property
    def content(self) -> str:
        try:
            return self._content
        except AttributeError:
            object.__setattr__(self, "_content", repr(self))
            return self._content


def cached_by_content(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Decorator that caches ``function`` by the content of its arguments; the first argument is a configuration.

    The planner calls such functions thousands of times. Callers must not change a result. Only configurations of
    ``as_config`` are cached, because the ``repr`` of a transformers configuration, the cache key, is slow.
    """
    cache: dict[tuple[str, str], _Result] = {}

    @functools.wraps(function)
    def cached(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        facts = args[0]
        if type(facts) is not _Facts:
            return function(*args, **kwargs)
        content = (facts.content, repr((args[1:], kwargs)))
        if content not in cache:
            if len(cache) > _MAX_CACHED:
                cache.clear()
            cache[content] = function(*args, **kwargs)
        return cache[content]

    return cached


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises ModelError if the file is not a JSON object or has a duplicate key."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object, but a {type(content).__name__}")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a duplicate key, because readers differ in which value they take."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return content


def read_model_json(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder, with the fields of its language model at the top (``with_text``).

    Raises:
        ModelError: the file is not a JSON object, or a field of a supported family has an impossible value.
    """
    file = Path(folder) / "config.json"
    model = read_json_object(file)
    # Only for supported families: fields of other models may have the same names and a different meaning.
    problems = list(field_problems(model)) if is_supported(model.get("model_type")) else []
    if problems:
        raise ModelError(f"{file}: {'; '.join(problems)}")
    return with_text(model)


def is_supported(model_type: Any) -> bool:
    return isinstance(model_type, str) and model_type in families()


def with_text(model: Mapping[str, Any]) -> dict[str, Any]:
    """``model`` with the fields of ``text_config``, a vision-language model's language model, moved to the top."""
    rest = {name: value for name, value in model.items() if name != "text_config"}
    text = model.get("text_config")
    # The outer model_type wins: the inner type (qwen3_vl_text) is not the name of a family.
    return {**rest, **text, "model_type": model.get("model_type")} if isinstance(text, dict) else dict(model)


def as_config(model: Mapping[str, Any]) -> ModelConfig:
    """The result of ``read_model_json`` as an object with attributes."""
    return _Facts(**model)


def has_vision(model: Mapping[str, Any]) -> bool:
    """Return whether ``model``, from ``read_model_json``, is a vision-language model of a supported family."""
    model_type = model.get("model_type")
    return is_supported(model_type) and families()[str(model_type)].vision is not None


def vision_token_ids(config: ModelConfig) -> tuple[int, ...]:
    """Ids of image placeholders and their delimiters, which no response may contain. Empty without vision."""
    vision = family_of(config).vision
    ids = (getattr(config, name, None) for name in (vision.token_ids if vision is not None else ()))
    return tuple(sorted({token for token in ids if isinstance(token, int)}))


def vision_titles() -> list[str]:
    """Display names of the families that take images, sorted."""
    return sorted({family.vision.title for family in families().values() if family.vision is not None})


def takes_images(config: ModelConfig) -> bool:
    return family_of(config).vision is not None


def text_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the language model: the nested ``text_config`` of a vision-language model, else ``config``."""
    return getattr(config, "text_config", config) if takes_images(config) else config


@cached_by_content
def has_experts(config: ModelConfig) -> list[bool]:
    """One flag per decoder layer: True if the layer is a mixture of experts; all False in a dense model."""
    experts, text = family_of(config).experts, text_config(config)
    return [experts is not None and experts.in_layer(text, index) for index in range(text.num_hidden_layers)]


class LayerKind(NamedTuple):
    """Kind of a decoder layer; layers of the same kind in a model have the same shapes."""

    has_experts: bool
    is_linear: bool
    """True for linear attention, False for softmax attention."""


@cached_by_content
def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """The kind of each decoder layer."""
    is_linear, text = family_of(config).is_linear, text_config(config)
    linear = [is_linear is not None and is_linear(text, index) for index in range(text.num_hidden_layers)]
    return [LayerKind(*kind) for kind in zip(has_experts(config), linear, strict=True)]


def has_linear_attention(config: ModelConfig) -> bool:
    """Return whether any decoder layer has linear attention."""
    return any(kind.is_linear for kind in layer_kinds(config))


@cached_by_content
def layer_windows(config: ModelConfig) -> list[int | None]:
    """The number of tokens that a token of each decoder layer attends to, itself included; None: all."""
    window, text = family_of(config).window, text_config(config)
    return [window and window(text, index) for index in range(text.num_hidden_layers)]


def uses_only_experts(config: ModelConfig) -> bool:
    """True if every layer is a mixture of experts with its own size, so that no MLP has ``intermediate_size``."""
    experts = family_of(config).experts
    return experts is not None and experts.ffn_size != "intermediate_size" and all(has_experts(config))


def num_experts(config: ModelConfig) -> int:
    """Number of experts per layer as configured, even if no layer has experts; 0 for a dense family."""
    experts, text = family_of(config).experts, text_config(config)
    numbers = [getattr(text, name, None) or 0 for name in experts.number] if experts is not None else []
    return next(filter(None, numbers), 0)


def expert_ffn_size(config: ModelConfig) -> int:
    """Inner features of one expert; ``intermediate_size`` if the model has no separate expert size."""
    experts, text = family_of(config).experts, text_config(config)
    own = getattr(text, experts.ffn_size, 0) if experts is not None else 0
    return own or getattr(text, "intermediate_size", 0)


def router_groups(config: ModelConfig) -> tuple[int, int]:
    """(number of expert groups, number of groups that a token's experts may come from); (1, 1) without groups."""
    experts, text = family_of(config).experts, text_config(config)
    groups, chosen = (experts.groups if experts is not None else None) or ("", "")
    return getattr(text, groups, None) or 1, getattr(text, chosen, None) or 1


def num_mtp_layers(config: ModelConfig) -> int:
    """Number of multi-token-prediction layers in the configuration."""
    return getattr(text_config(config), family_of(config).num_mtp_layers, None) or 0


@cached_by_content
def dims(config: ModelConfig) -> Mapping[str, int]:
    """Maps the size names of the families' tables to this model's sizes."""
    family, text = family_of(config), text_config(config)
    heads = text.num_attention_heads
    # Optional in the files of every family: transformers omits sizes that follow from the others.
    groups = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    expert_ffn = expert_ffn_size(config)
    sizes = {
        "one": 1,
        "hidden": text.hidden_size,
        "heads": heads,
        "groups": groups,
        "head_dim": head_dim,
        "q": heads * head_dim,
        "kv": groups * head_dim,
        # Not in files of a family whose layers all are mixtures.
        "ffn": getattr(text, "intermediate_size", 0),
        "vocab": text.vocab_size,
        "experts": num_experts(config) if any(has_experts(config)) else 0,
        "expert_ffn": expert_ffn,
        "expert_gate_up": 2 * expert_ffn,
        "shared_ffn": expert_ffn * (getattr(text, "n_shared_experts", None) or 0),
    }
    if family.is_latent:
        content, position = text.qk_nope_head_dim, text.qk_rope_head_dim
        sizes |= {
            "head_dim": content + position,
            "q": heads * (content + position),
            "q_latent": text.q_lora_rank or 0,
            "kv_latent": text.kv_lora_rank,
            "kv_down": text.kv_lora_rank + position,
            "kv_up": heads * (content + text.v_head_dim),
            "attended": heads * text.v_head_dim,
        }
    return {**sizes, **family.sizes(text)}


def split_sizes(config: ModelConfig) -> dict[str, int]:
    """Sizes that tensor parallelism divides among ranks, keyed by their names in config.json."""
    sizes = dims(config)
    split = {"num_key_value_heads": sizes["groups"], "num_attention_heads": sizes["heads"]}
    if not uses_only_experts(config):
        split["intermediate_size"] = sizes["ffn"]
    if sizes["experts"]:
        split["moe_intermediate_size x n_shared_experts"] = sizes["shared_ffn"]
    if family_of(config).is_latent:
        # Also divisible, although they end up replicated: Megatron builds these layers split before they are replaced.
        split["q_lora_rank"] = sizes["q_latent"]
        split["kv_lora_rank + qk_rope_head_dim"] = sizes["kv_down"]
    if has_linear_attention(config):
        split["linear_num_key_heads"] = sizes["linear_key_heads"]
    return split
