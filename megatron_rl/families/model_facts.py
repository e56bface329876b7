"""Reads a model's config.json, and derives the facts that many modules need from it.

A configuration is read by attributes: transformers' PretrainedConfig, or the file itself (``as_config``), which may omit
fields that have a default in transformers.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from megatron_rl.errors import ModelError
from megatron_rl.families.family import ModelConfig, families, family_of
from megatron_rl.families.fields import field_problems

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_MAX_CACHED = 20_000


def cached_by_content(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Decorator that caches ``function`` by the content of its arguments; the first argument is a configuration.

    The planner calls such functions thousands of times. Callers must not change a result. Only configurations of
    ``as_config`` are cached, because the ``repr`` of a transformers configuration, the cache key, is slow.
    """
    cache: dict[str, _Result] = {}

    @functools.wraps(function)
    def cached(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if type(args[0]) is not SimpleNamespace:
            return function(*args, **kwargs)
        content = repr((args, kwargs))
        if content not in cache:
            if len(cache) > _MAX_CACHED:
                cache.clear()
            cache[content] = function(*args, **kwargs)
        return cache[content]

    return cached


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises ModelError if the file is not a JSON object or repeats a name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object, but a {type(content).__name__}")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Duplicate names are refused, because readers differ in which value they take."""
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
    return SimpleNamespace(**model)


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
    """Return whether the model takes images."""
    return family_of(config).vision is not None


def text_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the language model: the nested ``text_config`` of a vision-language model, else ``config``."""
    return getattr(config, "text_config", config) if takes_images(config) else config


@cached_by_content
def has_experts(config: ModelConfig) -> list[bool]:
    """One flag per decoder layer: True if the layer is a mixture of experts; all False in a dense model."""
    experts, text = family_of(config).experts, text_config(config)
    return [experts is not None and experts.in_layer(text, index) for index in range(text.num_hidden_layers)]


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
        "ffn": text.intermediate_size,
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
    return sizes


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
    return split
