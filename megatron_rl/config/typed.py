"""Values as YAML has them -> what the schema's annotations want, or a ConfigError that names the key.

What is written otherwise but means the same is taken: text that reads as a number, a number where text is wanted, 0 and 1
for false and true.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_origin

from megatron_rl.config.keys import near_misses
from megatron_rl.config.schema import Config
from megatron_rl.config.schema.bounds import container_problem, item_type, named_items, not_null, shown
from megatron_rl.errors import ConfigError

RENAMED: dict[str, str] = {}
"""Former name of a key or section -> its name now. A recipe that still has the former one is refused with the new one."""

_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_TO_BE_GIVEN = "???"
"""OmegaConf's mark of a value that a later layer has to give."""


def typed(key: str, value: Any, annotation: Any, *, is_layer: bool = False) -> Any:
    """``value`` of ``key`` as ``annotation`` wants it.

    ``is_layer``: it is only checked, for others follow: interpolations and marks stay as they are.
    """
    wanted = not_null(annotation)
    if is_layer and isinstance(value, str) and ("${" in value or value == _TO_BE_GIVEN):
        return value
    if value is None and (wanted is not annotation or wanted is Any):
        return None
    wrong = container_problem(key, value, wanted)
    if wrong:
        raise ConfigError(wrong)
    if is_dataclass(wanted):
        return _section(key, value, wanted, is_layer=is_layer)
    if isinstance(value, dict | list):
        kind = item_type(wanted)
        parts = {name: typed(f"{key}.{name}", part, kind, is_layer=is_layer) for name, part in named_items(value)}
        return parts if isinstance(value, dict) else list(parts.values())
    if value == _TO_BE_GIVEN:
        raise ConfigError(f"{key}: expected a value, but every layer leaves it at {_TO_BE_GIVEN}; give one")
    return _single(key, value, wanted)


def merge_layers(base: Any, layer: Any, annotation: Any) -> Any:
    """``layer`` over ``base``, both as YAML has them; an empty mapping of names empties the one below it."""
    if not isinstance(base, dict) or not isinstance(layer, dict) or (not layer and get_origin(annotation) is dict):
        return layer
    parts = {name: merge_layers(base.get(name), part, annotation_of(name, annotation)) for name, part in layer.items()}
    return {**base, **parts}


def annotation_of(name: str, annotation: Any) -> Any:
    """Of item ``name`` of a value of this annotation; Any for a name that a section does not have."""
    section = not_null(annotation)
    if is_dataclass(section):
        return next((item.type for item in fields(section) if item.name == name), Any)
    return item_type(section)


def to_yaml_values(value: Any) -> Any:
    """A section and all in it as YAML has them."""
    if is_dataclass(value):
        return {item.name: to_yaml_values(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {name: to_yaml_values(part) for name, part in value.items()}
    if isinstance(value, list):
        return [to_yaml_values(part) for part in value]
    return value.value if isinstance(value, Enum) else value


def _section(key: str, value: Mapping[str, Any], section: Any, *, is_layer: bool) -> Any:
    kinds = {item.name: item.type for item in fields(section)}
    parts: dict[str, Any] = {}
    for name, part in value.items():
        full = f"{key}.{name}" if key else str(name)
        if name not in kinds:
            raise ConfigError(f"unknown key {shown(full)}{_suggestion(full)}")
        parts[name] = typed(full, part, kinds[name], is_layer=is_layer)
    return section(**parts)


def _single(key: str, value: Any, wanted: Any) -> Any:
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        choices = {str(member.value): member for member in wanted}
        # YAML reads off and none-like words as it likes; what was written is the name.
        if str(value) in choices:
            return choices[str(value)]
        raise ConfigError(f"{key}: expected one of {', '.join(choices)}, got {shown(value)}")
    readers: dict[Any, tuple[str, Callable[[Any], Any]]] = {
        bool: ("true or false", _truth),
        bool | str: ("true, false or a word", lambda word: _TRUTH.get(str(word).lower(), _text(word))),
        int: ("a whole number", _whole),
        float: ("a number", _number),
        str: ("text", _text),
    }
    if wanted not in readers:
        return value
    expected, read = readers[wanted]
    try:
        return read(value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{key}: expected {expected}, got {shown(value)}") from error


def _truth(value: Any) -> bool:
    return _TRUTH[str(value).lower()]


def _whole(value: Any) -> int:
    if isinstance(value, bool | float):
        raise ValueError(value)
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bytes):
        raise ValueError(value)
    return str(value)


def _suggestion(key: str) -> str:
    if key in RENAMED:
        return f"; it is called {RENAMED[key]!r} now"
    close = near_misses(key)
    return f"; did you mean {close[0]!r}?" if close else f"; sections are {', '.join(f.name for f in fields(Config))}"
