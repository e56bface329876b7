"""From a YAML recipe and ``key=value`` overrides to a checked, typed Config.

Layers, later ones win: the schema's defaults, the preset, the recipe files in their order, the overrides in theirs. One
default depends on other keys (``_decouple``). Each
layer is checked on its own so that an error can name the layer, the key and the remedy. Mappings are merged name by name;
an empty one (``reward.options={}``) takes away what the layers before it gave. YAML and interpolations are OmegaConf's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config, OldPolicy
from megatron_rl.config.schema.bounds import shown
from megatron_rl.config.typed import RENAMED, merge_layers, to_yaml_values, typed
from megatron_rl.errors import ConfigError

__all__ = ["RENAMED", "config_to_yaml", "flat_params", "load_config", "preset_names"]

PRESETS = Path(__file__).parent / "presets"


def load_config(paths: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = ()) -> Config:
    """Read one or more recipe files; raises ConfigError naming the file or override, the key and the remedy."""
    files = [paths] if isinstance(paths, (str, Path)) else list(paths or [])
    layers = [(str(path), _read_yaml(Path(path))) for path in files]
    layers += [("the command line", _parse_override(item)) for item in overrides]
    preset = next((layer["preset"] for _, layer in reversed(layers) if layer.get("preset")), "")
    if preset:
        layers.insert(0, (f"preset {preset}", _read_preset(preset)))
    values = to_yaml_values(Config())
    for origin, layer in layers:
        try:
            typed("", layer, Config, is_layer=True)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from error
        values = merge_layers(values, layer, Config)
    origins = ", ".join(map(str, files)) or "the command line"
    try:
        config: Config = typed("", _resolved(values), Config)
    except ConfigError as error:
        raise ConfigError(f"{origins}: {error}") from error
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or "?"
        raise ConfigError(f"{origins}: {key}: {_first_line(error)}") from error
    _decouple(config, [layer for _, layer in layers])
    return config


def config_to_yaml(config: Config) -> str:
    """The whole resolved configuration; load_config reads it back to an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.create(to_yaml_values(config)))


def flat_params(values: Config | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.key -> value as YAML has it, of a configuration or of nested mappings; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in to_yaml_values(values).items():
        if isinstance(value, Mapping) and value:
            flat |= flat_params(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def preset_names() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def _decouple(config: Config, layers: Sequence[dict[str, Any]]) -> None:
    """Tokens of an older policy train with the decoupled loss (arXiv 2505.24298), where no layer chooses a weight."""
    correction = config.algorithm.correction
    chosen = any("weight" in ((layer.get("algorithm") or {}).get("correction") or {}) for layer in layers)
    if overlap_of(config.schedule) >= Overlap.training and correction.old_policy is OldPolicy.recomputed and not chosen:
        correction.weight = "token"


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(
            f"configuration file {path} does not exist; pass a YAML file, for example examples/arithmetic/tppo.yaml"
        )
    try:
        loaded = OmegaConf.load(path)
        if isinstance(loaded, DictConfig):
            return _plain_layer(loaded)
        found = f"got a {type(loaded).__name__}"
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    except OSError as error:
        # So OmegaConf calls a file that holds a single value, too.
        found = _first_line(error)
    raise ConfigError(f"{path}: expected sections with keys (a YAML mapping), {found}")


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
        # "key=" means empty text; YAML would read it as null, which no field takes.
        return _plain_layer(OmegaConf.from_dotlist([f"{item}''" if item.endswith("=") else item]))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"override {item!r}: {_first_line(error)}") from error


def _is_utf8(text: str) -> bool:
    """False for bytes of the command line that are no UTF-8: Python reads them as lone surrogates."""
    return text.encode(errors="ignore").decode() == text


def _plain_layer(layer: DictConfig) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(layer)
    return content


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Interpolations replaced by what they name."""
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
