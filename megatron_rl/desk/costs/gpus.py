"""GPU peak figures: descriptions in ``gpus.yaml`` or in a user's file."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.errors import ConfigError

_OWN = Path(__file__).with_name("gpus.yaml")


@dataclass(frozen=True)
class Gpu:
    """Peaks of one GPU and of its links, one direction each. Units: 1/s, bytes, bytes/s."""

    source: str
    """Document that the figures are taken from."""
    flops: Mapping[str, float]
    """Operations per second of dense matrix products, keyed by data type (bfloat16, float8)."""
    hbm_bytes: float
    hbm_bandwidth: float
    nvlink_bandwidth: float
    """Bandwidth to other GPUs of the node."""
    nic_bandwidth: float
    """Bandwidth to other nodes."""
    per_machine: int
    """GPUs per node."""


def gpu(name: str, file: Path = _OWN) -> Gpu:
    """The description of ``name`` (case-insensitive). Raises ConfigError if ``file`` lacks the name or one of the fields."""
    described = _read(file)
    name = next((known for known in described if known.lower() == name.lower()), name)
    if name not in described:
        raise ConfigError(f"GPU {name!r} is not described in {file}; described: {', '.join(described)}")
    names = {field.name for field in fields(Gpu)}
    if described[name].keys() != names:
        raise ConfigError(f"{file}: {name}: expected the fields {', '.join(sorted(names))}, got {', '.join(sorted(described[name]))}")
    return Gpu(**described[name])


def larger_gpus(than: Gpu) -> list[tuple[str, Gpu]]:
    """Return the (name, description) of each described GPU with more memory, the smallest first."""
    described = [(name, gpu(name)) for name in _read(_OWN)]
    return sorted((one for one in described if one[1].hbm_bytes > than.hbm_bytes), key=lambda one: one[1].hbm_bytes)


@functools.cache
def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: expected a YAML file with names of GPUs and their fields: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(fields, dict) for fields in content.values()):
        raise ConfigError(f"{file}: expected names of GPUs with their fields")
    return content
