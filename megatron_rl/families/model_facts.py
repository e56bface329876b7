"""What a model's config.json says: its one reader, and the facts that are asked of it in many places.

A configuration is read by attributes: transformers' PretrainedConfig, or the file itself (``as_config``), which may
leave out what transformers has a default for.
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

_Asked = ParamSpec("_Asked")
_Said = TypeVar("_Said")
_MOST_REMEMBERED = 20_000


def cached_by_content(function: Callable[_Asked, _Said]) -> Callable[_Asked, _Said]:
    """``function`` of a model's facts, and of what else it takes, asked once for each content: a plan asks a thousand times.

    What it gives must not be changed. Only facts of ``as_config`` are remembered; transformers' objects print slowly.
    """
    said: dict[str, _Said] = {}

    @functools.wraps(function)
    def asked(*words: _Asked.args, **named: _Asked.kwargs) -> _Said:
        if type(words[0]) is not SimpleNamespace:
            return function(*words, **named)
        content = repr((words, named))
        if content not in said:
            if len(said) > _MOST_REMEMBERED:
                said.clear()
            said[content] = function(*words, **named)
        return said[content]

    return asked


def read_json_object(path: Path) -> dict[str, Any]:
    """ModelError when the file is not a JSON object, or says something twice."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object, but a {type(content).__name__}")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; readers differ in which of two equal names they take."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands in it twice")
    return content


def read_model_json(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder (``with_text``).

    ModelError when it is not a JSON object, or when a field of a family that is supported cannot be right.
    """
    file = Path(folder) / "config.json"
    model = read_json_object(file)
    # Fields of other models may be called the same and mean something else.
    problems = list(field_problems(model)) if is_supported(model.get("model_type")) else []
    if problems:
        raise ModelError(f"{file}: {'; '.join(problems)}")
    return with_text(model)


def is_supported(model_type: Any) -> bool:
    return isinstance(model_type, str) and model_type in families()


def with_text(model: Mapping[str, Any]) -> dict[str, Any]:
    """``model`` with what a vision-language model says of its language model (``text_config``) next to the rest."""
    rest = {name: value for name, value in model.items() if name != "text_config"}
    text = model.get("text_config")
    # The inner model_type (qwen3_vl_text) is that of no family.
    return {**rest, **text, "model_type": model.get("model_type")} if isinstance(text, dict) else dict(model)


def as_config(model: Mapping[str, Any]) -> ModelConfig:
    """What ``read_model_json`` gave, by attributes."""
    return SimpleNamespace(**model)


def has_vision(model: Mapping[str, Any]) -> bool:
    """Whether ``model``, from ``read_model_json``, is a vision-language model of a family that is supported."""
    model_type = model.get("model_type")
    return is_supported(model_type) and families()[str(model_type)].vision is not None


def vision_token_ids(config: ModelConfig) -> tuple[int, ...]:
    """Ids that stand for or around images: no response may contain them. Empty without vision."""
    vision = family_of(config).vision
    found = (getattr(config, name, None) for name in (vision.token_ids if vision is not None else ()))
    return tuple(sorted({token for token in found if isinstance(token, int)}))


def vision_titles() -> list[str]:
    """The names of the families that see, as people write them."""
    return sorted({family.vision.title for family in families().values() if family.vision is not None})


def takes_images(config: ModelConfig) -> bool:
    """Whether the model takes images."""
    return family_of(config).vision is not None


def text_config(config: ModelConfig) -> ModelConfig:
    """The part of a model's configuration that describes its language model: all of it, or a nested one."""
    return getattr(config, "text_config", config) if takes_images(config) else config


@cached_by_content
def has_experts(config: ModelConfig) -> list[bool]:
    """For each decoder layer, whether it is a mixture of experts; all False in a dense model."""
    experts, text = family_of(config).experts, text_config(config)
    return [experts is not None and experts.in_layer(text, index) for index in range(text.num_hidden_layers)]


def uses_only_experts(config: ModelConfig) -> bool:
    """Every layer is a mixture of experts with a size of its own: nothing has the model's intermediate size."""
    experts = family_of(config).experts
    return experts is not None and experts.ffn_size != "intermediate_size" and all(has_experts(config))


def num_experts(config: ModelConfig) -> int:
    """Of one layer, also where no layer has them; 0 for a dense family."""
    experts, text = family_of(config).experts, text_config(config)
    numbers = [getattr(text, name, None) or 0 for name in experts.number] if experts is not None else []
    return next(filter(None, numbers), 0)


def expert_ffn_size(config: ModelConfig) -> int:
    """Inner features of one expert; those of a layer where there are none."""
    experts, text = family_of(config).experts, text_config(config)
    own = getattr(text, experts.ffn_size, 0) if experts is not None else 0
    return own or getattr(text, "intermediate_size", 0)


def router_groups(config: ModelConfig) -> tuple[int, int]:
    """(groups of experts, how many of them a token's experts may come from); one group where there are none."""
    experts, text = family_of(config).experts, text_config(config)
    groups, chosen = (experts.groups if experts is not None else None) or ("", "")
    return getattr(text, groups, None) or 1, getattr(text, chosen, None) or 1


def num_mtp_layers(config: ModelConfig) -> int:
    """Multi-token-prediction layers that the configuration counts."""
    return getattr(text_config(config), family_of(config).num_mtp_layers, None) or 0


@cached_by_content
def dims(config: ModelConfig) -> Mapping[str, int]:
    """The sizes that tables name."""
    family, text = family_of(config), text_config(config)
    heads = text.num_attention_heads
    # Optional in the files of every family: transformers leaves them out where they follow from the others.
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
    """What tensor-parallel ranks share out, by the names of config.json."""
    sizes = dims(config)
    split = {"num_key_value_heads": sizes["groups"], "num_attention_heads": sizes["heads"]}
    if not uses_only_experts(config):
        split["intermediate_size"] = sizes["ffn"]
    if sizes["experts"]:
        split["moe_intermediate_size x n_shared_experts"] = sizes["shared_ffn"]
    if family_of(config).is_latent:
        # Megatron builds them split before they are made whole.
        split["q_lora_rank"] = sizes["q_latent"]
        split["kv_lora_rank + qk_rope_head_dim"] = sizes["kv_down"]
    return split
