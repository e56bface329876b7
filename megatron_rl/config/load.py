"""From a YAML recipe and ``key=value`` overrides to a checked, typed Config.

Layers, later ones win: the schema's defaults, the preset, the recipe files in their order, the overrides. Each layer is
merged on its own so that an error can name the layer, the key and the remedy.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from megatron_rl.config.keys import near_misses
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError

PRESETS = Path(__file__).parent / "presets"

RENAMED: dict[str, str] = {}
"""Former name of a key or section -> its name now. A recipe that still has the former one is refused with the new one."""


def load_config(paths: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = ()) -> Config:
    """Read one or more recipe files; raises ConfigError naming the file or override, the key and the remedy."""
    files = [paths] if isinstance(paths, (str, Path)) else list(paths or [])
    recipes = [(str(path), _read_yaml(Path(path))) for path in files]
    layers = [*recipes, ("the command line", _parse_overrides(overrides))]
    preset = next((layer["preset"] for _, layer in reversed(layers) if layer.get("preset")), "")
    if preset:
        layers.insert(0, (f"preset {preset}", _read_preset(preset)))
    merged = OmegaConf.structured(Config)
    for origin, layer in layers:
        merged = _merge(merged, layer, origin)
    try:
        config: Any = OmegaConf.to_object(merged)
        return config
    except OmegaConfBaseException as error:
        raise ConfigError(f"{', '.join(map(str, files))}: {_first_line(error)}") from error


def config_to_yaml(config: Config) -> str:
    """The whole resolved configuration; load_config reads it back to an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flat_params(config: Config) -> dict[str, object]:
    """section.key -> value, for trackers."""
    flat: dict[str, object] = {}

    def walk(node: Any, prefix: str) -> None:
        for item in fields(node):
            value = getattr(node, item.name)
            if is_dataclass(value):
                walk(value, f"{prefix}{item.name}.")
            else:
                flat[prefix + item.name] = getattr(value, "value", value)

    walk(config, "")
    return flat


def preset_names() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def _read_yaml(path: Path) -> DictConfig:
    if not path.is_file():
        raise ConfigError(
            f"configuration file {path} does not exist; pass a YAML file, for example examples/arithmetic/tppo.yaml"
        )
    try:
        loaded = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: expected sections with keys (a YAML mapping), got a {type(loaded).__name__}")
    return loaded


def _read_preset(name: str) -> DictConfig:
    if name not in preset_names():
        raise ConfigError(f"preset: {name!r} is not a preset; choose one of {', '.join(preset_names())}")
    return _read_yaml(PRESETS / f"{name}.yaml")


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {item!r}: expected key=value, for example batch.window_tokens=24")
    try:
        # "key=" means empty text; YAML would read it as null, which no field takes.
        return OmegaConf.from_dotlist([f"{item}''" if item.endswith("=") else item for item in overrides])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"overrides {list(overrides)}: {_first_line(error)}") from error


def _merge(base: DictConfig, layer: DictConfig, origin: str) -> DictConfig:
    for name in map(str, layer):
        if isinstance(base.get(name), DictConfig) and not isinstance(layer[name], DictConfig):
            raise ConfigError(f"{origin}: {name}: expected a section with keys, got {layer[name]!r}")
    try:
        merged: Any = OmegaConf.merge(base, layer)
        return merged
    except ConfigKeyError as error:
        key = str(error.full_key)
        raise ConfigError(f"{origin}: unknown key {key!r}{_suggestion(key)}") from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or "?"
        raise ConfigError(f"{origin}: {key}: {_first_line(error)}") from error


def _suggestion(key: str) -> str:
    if key in RENAMED:
        return f"; it is called {RENAMED[key]!r} now"
    close = near_misses(key)
    return f"; did you mean {close[0]!r}?" if close else f"; sections are {', '.join(f.name for f in fields(Config))}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
