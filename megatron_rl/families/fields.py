"""Checks the fields of config.json one by one: types, signs and plausible sizes, independent of the model.

The check comes before any computation, so that an impossible file is reported by its field. Absent fields, and null for
optional fields, pass.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
    "rms_norm_eps": _number("a number above 0 and below 1", lambda value: 0 < value < 1),
    "routed_scaling_factor": _POSITIVE,
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
    **dict.fromkeys(("rope_parameters", "rope_scaling", "text_config", "vision_config"), _OBJECT),
    **dict.fromkeys(("torch_dtype", "dtype", "scoring_func", "topk_method"), _TEXT),
    "mlp_only_layers": _INDICES,
    "layer_types": _TEXTS,
    "partial_rotary_factor": _SHARE,
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
