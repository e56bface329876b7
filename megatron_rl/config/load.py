"""Reads YAML recipes and ``key=value`` overrides into a checked, typed Config.

Layers, later ones win: the schema's defaults, the preset, the recipe files in their order, the overrides in theirs.
One default depends on other keys (``_decouple``). Each layer is checked separately, so that an error can name the
layer, the key and the remedy. Mappings are merged name by name; an empty mapping (``reward.options={}``) removes
the entries of earlier layers. YAML and interpolations are OmegaConf's.

Values of another YAML type with the same meaning are accepted: text that parses as a number, a number for text, 0
and 1 for false and true.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.keys import keys_in, near_misses
from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config, OldPolicy
from megatron_rl.config.schema.bounds import container_problem, item_type, named_items, not_null, shown
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.system.files.hub_cache import find_download
from megatron_rl.system.files.probes import read_regular

PRESETS = Path(__file__).parent / "presets"

_TRAINED = ("policy", "critic", "sft", "critic_pretrain", "reward_train", "dpo")
"""Sections with an optimizer."""
REMOVED: dict[str, tuple[Any, str]] = {
    "critic_pretrain.settle_tolerance": (0.02, "the tolerance is 0.02; set settle_window to converge later"),
    "health.max_mismatch": (0.1, "the limit is 0.1 nats per token; set health.mismatch=ignore to turn the sign off"),
    "health.max_reward_drop": (0.5, "the limit is half of the best reward; set health.reward_drop=ignore to turn the sign off"),
    "health.max_rollbacks": (2, "a run rolls back at most twice; set the sign's action to stop for no rollback"),
    "health.min_entropy": (0.001, "the limit is 0.001 nats per token; set health.entropy=ignore to turn the sign off"),
    "reward.process.comment_prefixes": (["#"], "only Python programs are read, so comments start with #"),
    "schedule.policy_trains_on": ("windows", "set schedule.training_window_tokens, 0 for whole responses"),
    **{f"{section}.optimizer.beta1": (0.9, "the decay of the mean of gradients is 0.9") for section in _TRAINED},
}
"""Removed key -> the value that replaced it, and the remedy.

That value is accepted, because the config.yaml of an earlier run lists every key; any other value is refused.
"""

_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_YAML_PROBLEMS = {
    "mapping values are not allowed": "a second colon, or a line indented more than the line above; put text with ': ' in quotes",
    "could not find expected ':'": "a line without 'key: value', or a quote or bracket above is not closed",
    "cannot start any token": "a value that begins with a sign of YAML such as @, % or `; put it in quotes",
    "expected key": "a line that is indented differently from the other keys of its section",
    "expected ',' or ']'": "a list that begins with [ and has no comma or ] here",
    "expected ',' or '}'": "a mapping that begins with { and has no comma or } here",
    "while scanning a quoted scalar": "a quote that is not closed, or a backslash in double quotes; use single quotes",
    "found undefined alias": "a value that begins with *; put it in quotes",
    "while scanning an a": "a value that begins with * or &; put it in quotes",
    "constructor for the tag": "a value that begins with !; put it in quotes",
    "expected a single document": "a line of three dashes; a recipe is one document, so remove it",
    "control characters are not allowed": "a control character; remove it",
    "duplicate key": "a key that occurs twice in its section; keep one",
    "unhashable key": "a list or mapping as a key; a key is a word",
    "unknown escape character": "a backslash in double quotes; use single quotes",
}
"""Words of PyYAML -> the mistake that usually causes them."""
_MISSING = "???"
"""OmegaConf's marker of a value that a later layer must set."""


def load_config(paths: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = ()) -> Config:
    """Merge recipe files (None: no file) and ``key=value`` overrides into a Config; the module's docstring has the precedence.

    Raises ConfigError naming the file or override, the key and the remedy.
    """
    files = [paths] if isinstance(paths, (str, Path)) else list(paths or [])
    layers = [(str(path), _read_yaml(Path(path))) for path in files]
    layers += [("the command line", _parse_override(item)) for item in overrides]
    preset = next((layer["preset"] for _, layer in reversed(layers) if layer.get("preset") not in (None, "")), "")
    if preset != "":
        layers.insert(0, (f"preset {preset}", _read_preset(preset)))
    values = _defaults()
    for origin, layer in layers:
        try:
            _typed("", layer, Config, is_layer=True)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from error
        values = _merged(values, layer, Config)
    origins = ", ".join(map(str, files)) or "the command line"
    try:
        config: Config = _typed("", _resolved(values), Config)
    except ConfigError as error:
        raise ConfigError(f"{origins}: {error}") from error
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or "?"
        raise ConfigError(f"{origins}: {key}: {_first_line(error)}") from error
    _decouple(config, [layer for _, layer in layers])
    _find_downloads(config)
    return config


def config_to_yaml(config: Config) -> str:
    """The whole resolved configuration as YAML; load_config reads it back to an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.create(to_yaml_values(config)))


def flat_params(values: Config | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Map section.key to its YAML value, for a configuration or nested mappings; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in to_yaml_values(values).items():
        if isinstance(value, Mapping) and value:
            flat |= flat_params(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_yaml_values(value: Any) -> Any:
    """Convert a section, with all sections and enums inside it, to YAML values."""
    if is_dataclass(value):
        return {item.name: to_yaml_values(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {name: to_yaml_values(part) for name, part in value.items()}
    if isinstance(value, list):
        return [to_yaml_values(part) for part in value]
    return value.value if isinstance(value, Enum) else value


def preset_names() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def _decouple(config: Config, layers: Sequence[dict[str, Any]]) -> None:
    """Choose the decoupled loss (arXiv 2505.24298) for tokens of an older policy, unless a recipe or override sets a weight."""
    correction = config.algorithm.correction
    chosen = any("weight" in ((layer.get("algorithm") or {}).get("correction") or {}) for layer in layers)
    if overlap_of(config.schedule) >= Overlap.training and correction.old_policy is OldPolicy.recomputed and not chosen:
        correction.weight = "token"


def _find_downloads(config: Config) -> None:
    """Replace names on the Hugging Face Hub by the folders of their downloads; the folders name the commits."""
    for model in (config.policy, config.critic, config.reference, config.reward.process):
        model.path = find_download(model.path, "model")
    by_type = config.reference.path_by_type
    config.reference.path_by_type = {name: find_download(path, "model") for name, path in by_type.items()}
    for section in (config.data, config.sft, config.reward_train, config.dpo):
        section.train_files = [find_download(name, "dataset") for name in section.train_files]
    for section in (config.data, config.reward_train, config.dpo):
        section.eval_files = [find_download(name, "dataset") for name in section.eval_files]
    for named in config.eval.sets.values():
        named.files = [find_download(name, "dataset") for name in named.files]


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ConfigError(
            f"configuration file {path} does not exist; pass a YAML file, for example examples/arithmetic/tppo.yaml"
        )
    try:
        text = read_regular(path).decode()
        loaded = _parsed(text)
        if isinstance(loaded, dict):
            return loaded
        found = f"got a {loaded}"
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_yaml_problem(error, text)}") from error
    except UserError as error:
        raise ConfigError(f"configuration file {error}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    except OSError as error:
        # OmegaConf also raises OSError for a file with a single value.
        found = f"which it is not ({error.strerror})" if error.strerror else _first_line(error)
    raise ConfigError(f"{path}: expected sections with keys (a YAML mapping), {found}")


@lru_cache(maxsize=64)
def _parsed(text: str) -> dict[str, Any] | str:
    """The mapping that ``text`` is, which callers must not change, or the type of another value."""
    try:
        loaded = OmegaConf.load(io.StringIO(text))
    except AssertionError:  # OmegaConf's own, for a number in quotes
        return "str"
    return _plain_layer(loaded) if isinstance(loaded, DictConfig) else type(loaded).__name__


def _read_preset(name: object) -> dict[str, Any]:
    if name not in preset_names():
        raise ConfigError(f"preset: {shown(name)} is not a preset; choose one of {', '.join(preset_names())}")
    return _read_yaml(PRESETS / f"{name}.yaml")


def _parse_override(item: str) -> dict[str, Any]:
    key, equals, _ = item.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {item!r}: expected key=value, for example batch.window_tokens=24")
    if not _is_utf8(item):
        raise ConfigError(f"override {item!r}: expected text that can be written as UTF-8")
    try:
        # "key=" means empty text; YAML would read null, which no field accepts.
        return _plain_layer(OmegaConf.from_dotlist([f"{item}''" if item.endswith("=") else item]))
    except yaml.YAMLError as error:
        raise ConfigError(f"override {item!r}{_yaml_problem(error, '')}") from error
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"override {item!r}: {_first_line(error)}") from error


def _yaml_problem(error: yaml.YAMLError, text: str) -> str:
    """Line and mistake of ``text``, which is not YAML, in the words of this package where the mistake is known."""
    said = " ".join(str(error).split())
    known = next((meaning for words, meaning in _YAML_PROBLEMS.items() if words in said), "")
    mark = getattr(error, "problem_mark", None)
    lines = text.splitlines()
    if mark is None or not lines:
        return f": not valid YAML: {known or said}"
    number = min(mark.line, len(lines) - 1)
    if "\t" in lines[number][: mark.column + 1]:
        known = "a tab; indent with blanks"
    return f", line {number + 1}: not valid YAML: {known or getattr(error, 'problem', said)}"


def _is_utf8(text: str) -> bool:
    """False for command-line bytes that are not UTF-8: Python reads them as lone surrogates."""
    return text.encode(errors="ignore").decode() == text


def _plain_layer(layer: DictConfig) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(layer)
    return content


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Replace interpolations by their values."""
    if not _has_interpolation(values):
        return values
    resolved: Any = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    return resolved


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_interpolation, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "${" in value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _merged(base: Any, layer: Any, annotation: Any) -> Any:
    """Lay ``layer`` over ``base``, both YAML values; an empty mapping of names removes the names below it."""
    if not isinstance(base, dict) or not isinstance(layer, dict) or (not layer and get_origin(annotation) is dict):
        return layer
    parts = {name: _merged(base.get(name), part, _annotation_of(name, annotation)) for name, part in layer.items()}
    return {**base, **parts}


def _annotation_of(name: str, annotation: Any) -> Any:
    """Annotation of item ``name`` in a value with ``annotation``; Any for a name that a section does not have."""
    section = not_null(annotation)
    named: Any = section
    return _kinds(named).get(name, Any) if is_dataclass(section) else item_type(section)


def _typed(key: str, value: Any, annotation: Any, *, is_layer: bool = False) -> Any:
    """Convert the YAML ``value`` of ``key`` to ``annotation``, or raise a ConfigError that names the key.

    ``is_layer``: the value is only checked, and interpolations and markers stay unchanged, because other layers follow.
    """
    wanted = not_null(annotation)
    if is_layer and isinstance(value, str) and ("${" in value or value == _MISSING):
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
        parts = {name: _typed(f"{key}.{name}", part, kind, is_layer=is_layer) for name, part in named_items(value)}
        return parts if isinstance(value, dict) else list(parts.values())
    if value == _MISSING:
        raise ConfigError(f"{key}: expected a value, but every layer leaves it at {_MISSING}; give one")
    return _single(key, value, wanted)


def _section(key: str, value: Mapping[str, Any], section: Any, *, is_layer: bool) -> Any:
    kinds = _kinds(section)
    parts: dict[str, Any] = {}
    for name, part in value.items():
        full = f"{key}.{name}" if key else str(name)
        if name in kinds:
            parts[name] = _typed(full, part, kinds[name], is_layer=is_layer)
        elif full not in REMOVED or REMOVED[full][0] != part:
            raise ConfigError(f"unknown key {shown(full)}{_suggestion(full)}")
    return section(**parts)


@cache
def _kinds(section: Any) -> Mapping[str, Any]:
    """Annotation of each key of a section."""
    return {item.name: item.type for item in fields(section)}


@cache
def _defaults() -> Any:
    """The schema's defaults, which callers must not change."""
    return to_yaml_values(Config())


def _suggestion(key: str) -> str:
    if key in REMOVED:
        return f", which was removed: {REMOVED[key][1]}"
    close = near_misses(key)
    if close:
        return f"; did you mean {close[0]!r}?"
    section = key.rpartition(".")[0]
    return f"; {f'{section} has' if section else 'sections are'} {', '.join(keys_in(section))}"


def _single(key: str, value: Any, wanted: Any) -> Any:
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        choices = {str(member.value): member for member in wanted}
        # YAML converts words such as off and none, but their text is still the name of the choice.
        if str(value) in choices:
            return choices[str(value)]
        raise ConfigError(f"{key}: expected one of {', '.join(choices)}, got {shown(value)}")
    if wanted not in _READERS:
        return value
    expected, read = _READERS[wanted]
    try:
        return read(value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{key}: expected {expected}, got {shown(value)}") from error


def _truth(value: Any) -> bool:
    return _TRUTH[str(value).lower()]


def _truth_or_word(value: Any) -> bool | str:
    # 0 and 1 are refused: they may be meant as a number, such as the step to resume from.
    if str(value).isdecimal():
        raise ValueError(value)
    return _TRUTH.get(str(value).lower(), _text(value))


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


_READERS: Mapping[Any, tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", _truth),
    bool | str: ("true, false or a word", _truth_or_word),
    int: ("a whole number", _whole),
    float: ("a number", _number),
    str: ("text", _text),
}
"""Type of a single value -> its name in messages, and the function that reads it."""
