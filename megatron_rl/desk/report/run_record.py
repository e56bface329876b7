"""Reads a run's folder for the report. Any file may be missing, and the run may still be running."""

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_rl.tracking.metrics_file import MetricsRow, iterate_metrics
from megatron_rl.tracking.timeline import Span, read_timeline

_SIGNS_OF_A_RUN = ("config.yaml", "metrics.jsonl", "status.json", ".lock")
_GENERAL_NAMES = ("run", "output", "outputs")


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run's folder."""

    name: str
    steps: np.ndarray
    """[N] step numbers, ascending, each once."""
    columns: Mapping[str, np.ndarray]
    """Metric name to [N] values, NaN where a step lacks the metric."""
    times_s: np.ndarray
    """[N] Unix times of the lines in metrics.jsonl."""
    spans: Sequence[Span]
    config: Mapping[str, Any]
    config_text: str
    summary: Mapping[str, Any]

    def values(self, name: str) -> np.ndarray:
        """A metric's values [N] float64; all NaN if no step has it."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def finite(self, name: str) -> np.ndarray:
        """A metric's finite values [M], in order."""
        values = self.values(name)
        return values[np.isfinite(values)]

    def setting(self, dotted: str) -> Any:
        """A configuration value, or None if the file lacks the key."""
        node: Any = self.config
        for key in dotted.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return node

    def hours(self) -> np.ndarray:
        """Training hours [N] at the end of each step; pauses between a crash and its resume do not count."""
        step_s = self.values("step/time_s")
        if np.isfinite(step_s).any():
            return np.cumsum(np.nan_to_num(step_s)) / 3600
        return (self.times_s - self.times_s[:1]) / 3600


def load_run(output_dir: str | Path) -> RunRecord:
    """Read the run's folder. Raises FileNotFoundError if there is no such folder; damaged files count as missing."""
    folder = check_run_folder(output_dir)
    config_text = read_text(folder / "config.yaml")
    return record_of(
        run_name(folder),
        iterate_metrics(folder / "metrics.jsonl"),
        spans=read_timeline(folder / "timeline.json"),
        config_text=config_text,
        summary=read_summary(folder),
    )


def check_run_folder(output_dir: str | Path) -> Path:
    """Return the folder of a run. Raises FileNotFoundError if it does not exist, is a file, or has no file of a run."""
    folder = Path(output_dir)
    if folder.is_dir() and any((folder / name).exists() for name in _SIGNS_OF_A_RUN):
        return folder
    found = "a folder without one" if folder.is_dir() else "a file" if folder.exists() else "a path that does not exist"
    raise FileNotFoundError(f"{folder}: expected the output folder of a run (run.output_dir), got {found}")


def run_name(folder: Path) -> str:
    """The folder's name; with its parent's name if it is as general as "run"."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if path.name in _GENERAL_NAMES else path.name


def record_of(
    name: str,
    lines: Iterable[MetricsRow],
    *,
    spans: Sequence[Span] = (),
    config_text: str = "",
    summary: Mapping[str, Any] | None = None,
) -> RunRecord:
    """The record of ``lines`` in any order; omitted arguments count as missing files.

    A step logged in two lines has the metrics of both. Values are stored once, as numbers: 8 bytes each.
    """
    index_of: dict[int, int] = {}
    times = array("d")
    values: dict[str, array[float]] = {}
    for row in lines:
        index = index_of.setdefault(row.step, len(index_of))
        times[index : index + 1] = array("d", [row.time_s])
        for metric, value in row.metrics.items():
            column = values.setdefault(metric, array("d"))
            column.extend([math.nan] * (len(index_of) - len(column)))
            column[index] = value
    for column in values.values():
        column.extend([math.nan] * (len(index_of) - len(column)))
    steps = np.array(list(index_of), dtype=np.int64)
    order = np.argsort(steps)
    return RunRecord(
        name=name,
        steps=steps[order],
        columns={metric: np.asarray(column)[order] for metric, column in values.items()},
        times_s=np.asarray(times)[order],
        spans=spans,
        config=_mapping(yaml.safe_load, config_text, yaml.YAMLError),
        config_text=config_text,
        summary=summary or {},
    )


def extended(run: RunRecord, lines: Sequence[MetricsRow]) -> RunRecord:
    """``run`` with ``lines`` of later steps appended; much cheaper than rebuilding the record."""
    new = record_of(run.name, lines)
    return replace(
        run,
        steps=np.concatenate([run.steps, new.steps]),
        columns={name: np.concatenate([run.values(name), new.values(name)]) for name in dict.fromkeys([*run.columns, *new.columns])},
        times_s=np.concatenate([run.times_s, new.times_s]),
    )


def read_text(path: Path) -> str:
    """The text of a file, or an empty string if it does not exist."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_summary(folder: Path) -> Mapping[str, Any]:
    """The contents of summary.json; empty before the end of the run."""
    return _mapping(json.loads, read_text(folder / "summary.json"), ValueError)


def _mapping(parse: Callable[[str], Any], text: str, error: type[Exception]) -> Mapping[str, Any]:
    try:
        parsed = parse(text) if text else {}
    except error:
        return {}
    return parsed if isinstance(parsed, Mapping) else {}
