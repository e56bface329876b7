"""The cost model in seconds, filled from a run's records, a file or formulas. Pure.

Every cost is a sum of a fixed part and parts per unit of work, so that it can be written by hand:

    decode: {running: [1, 64, 512], step_s: [0.012, 0.013, 0.020], context_token_s: 1.0e-9}
    prefill: {token_s: 2.0e-5}
    stages:
      update_policy: {token_s: 6.0e-5}
      publish: {fixed_s: 3.0}
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_rl.errors import DataError, UserError
from megatron_rl.schedule.table import row_of
from megatron_rl.system.files.atomic_files import write_atomic


@dataclass(frozen=True)
class Decode:
    """One decode step of one server, in which every running response grows by a token."""

    running: tuple[float, ...] = (1.0,)
    """Numbers of running responses, increasing."""
    step_s: tuple[float, ...] = (0.01,)
    """Seconds of a step with these numbers of responses; linear between them, and extrapolated from the last two."""
    context_token_s: float = 0.0
    """Additional seconds of a step per context token (prompt and response) of the running responses."""

    def seconds(self, running: np.ndarray) -> np.ndarray:
        """Return the seconds of a step with these numbers of running responses, without their context."""
        nodes, values = np.array(self.running), np.array(self.step_s)
        inside = np.interp(running, nodes, values)
        if len(nodes) == 1:
            return inside
        slope = (values[-1] - values[-2]) / (nodes[-1] - nodes[-2])
        return inside + slope * np.maximum(np.asarray(running) - nodes[-1], 0.0)


@dataclass(frozen=True)
class LinearCost:
    """Seconds of a stage or a prefill: a fixed cost plus costs per token, squared length, row and update."""

    fixed_s: float = 0.0
    """Seconds per run of the stage."""
    token_s: float = 0.0
    """Seconds per token: a prefill counts the requests' tokens, a trainer stage its rows' tokens with prompts and prefixes, and
    generate the new tokens."""
    square_s: float = 0.0
    """Seconds per squared length of a sequence (attention)."""
    row_s: float = 0.0
    """Seconds per request, sequence or response."""
    update_s: float = 0.0
    """Seconds per update; for ``evaluate`` and ``checkpoint``, additional seconds of a step in which one is due."""
    cores: float = 0.0
    """CPU cores that the work keeps busy without contention, per server for ``generate``; 0 if it causes no contention."""

    def seconds(self, *, tokens: float = 0.0, squares: float = 0.0, rows: float = 0.0, updates: float = 0.0) -> float:
        parts = (self.token_s * tokens, self.square_s * squares, self.row_s * rows, self.update_s * updates)
        return self.fixed_s + sum(parts)


@dataclass(frozen=True)
class Timing:
    """All costs of a run."""

    decode: Decode = field(default_factory=Decode)
    prefill: LinearCost = field(default_factory=LinearCost)
    """Prefill cost of one server, per request."""
    stages: Mapping[str, LinearCost] = field(default_factory=dict)
    """Costs by stage name; a missing stage takes no time. ``generate`` is the cost in addition to decode and prefill, over
    the tokens and rows of all servers."""
    between_s: float = 0.0
    """Seconds from the moment a stage could start to its start: the driver's own work."""
    cores: float = 0.0
    """Cores of the node that servers and trainer share; stages that want more of them slow down. 0 if none are shared."""
    overlap_rate: float = 1.0
    """Relative speed of stages that together fill the cores, because the cores share caches, memory and hyperthreads."""

    @property
    def sharing(self) -> dict[str, float]:
        """Return the keyword arguments of ``run_clock`` for contention and the driver's delay."""
        return {"cores": self.cores, "overlap_rate": self.overlap_rate, "between_s": self.between_s}

    def stage(self, name: str) -> LinearCost:
        return self.stages.get(name, LinearCost())


def read_timing(path: Path) -> Timing:
    """Read a YAML file of costs. Raises UserError if the file is missing or not valid."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--timing {path}: expected a YAML file of costs: {error}") from error
    return _timing_of(found, str(path))


def write_timing(path: Path, timing: Timing) -> None:
    # A fit leaves numpy's numbers, which YAML does not know; JSON's are Python's own.
    plain = json.loads(json.dumps(asdict(timing), default=float))
    plain["stages"] = {name: {k: v for k, v in work.items() if v} for name, work in plain["stages"].items()}
    plain["prefill"] = {k: v for k, v in plain["prefill"].items() if v}
    write_atomic(path, yaml.safe_dump(plain, sort_keys=False))


def _timing_of(found: object, path: str) -> Timing:
    values = _section(found, Timing, path)
    decode = _section(values.pop("decode", {}), Decode, f"{path}: decode")
    for name in ("running", "step_s"):
        if name in decode:
            numbers = decode[name] if isinstance(decode[name], list) else [decode[name]]
            decode[name] = tuple(_number(number, f"{path}: decode.{name}") for number in numbers)
    if "context_token_s" in decode:
        decode["context_token_s"] = _number(decode["context_token_s"], f"{path}: decode.context_token_s")
    curve = Decode(**decode)
    if len(curve.running) != len(curve.step_s) or any(
        a >= b for a, b in zip(curve.running, curve.running[1:], strict=False)
    ):
        raise UserError(f"--timing {path}: decode: running must rise, with a value of step_s for each, got {decode}")
    stages = values.pop("stages", {})
    if not isinstance(stages, dict):
        raise UserError(f"--timing {path}: stages: expected costs by stage name, got {stages!r}")
    return Timing(
        decode=curve,
        prefill=_work(values.pop("prefill", {}), f"{path}: prefill"),
        stages={_known_stage(str(name), path): _work(work, f"{path}: stages.{name}") for name, work in stages.items()},
        **{name: _number(value, f"{path}: {name}") for name, value in values.items()},
    )


def _known_stage(name: str, path: str) -> str:
    try:
        return row_of(name).name
    except DataError as error:
        raise UserError(f"--timing {path}: stages: {error}") from error


def _work(found: object, place: str) -> LinearCost:
    return LinearCost(**{name: _number(value, f"{place}.{name}") for name, value in _section(found, LinearCost, place).items()})


def _section(found: object, schema: type, place: str) -> dict[str, Any]:
    names = [item.name for item in fields(schema)]
    if not isinstance(found, dict) or not set(found) <= set(names):
        raise UserError(f"--timing {place}: expected a mapping with any of {', '.join(names)}, got {found!r}")
    return dict(found)


def _number(value: object, place: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # "1e-5" is text to YAML
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UserError(f"--timing {place}: expected a number of at least 0, got {value!r}")
    return number
