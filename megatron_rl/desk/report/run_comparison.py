"""Writes ``comparison.html``: several runs on one page.

The page has the report's charts with a line per run, the keys in which the recipes differ, and lengths, stage
times and memory side by side. The runs' folders are only read.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.load import flat_params
from megatron_rl.desk.report import charts
from megatron_rl.desk.report.charts import Series
from megatron_rl.desk.report.health_checks import HealthCheck, health_checks, smooth, smoothing_span
from megatron_rl.desk.report.html_page import ReportPage, ReportPanel, ReportSection, ReportTable, render
from megatron_rl.desk.report.resource_panels import early_and_late_lengths
from megatron_rl.desk.report.run_record import RunRecord, load_run
from megatron_rl.desk.report.training_panels import SECTIONS
from megatron_rl.errors import DataError
from megatron_rl.schedule.table import ROWS
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.console import accuracy_text, compact, duration

COLORS = ("blue", "orange", "green", "violet", "red", "teal", "pink", "yellow", "sky", "grey")
_NOT_COMPARED = ("run.output_dir", "run.resume", "run.overwrite")
_MAX_RUNS = len(COLORS)
_MISSING = "-"
_MINUTES_UP_TO_H = 3.0


def write_comparison(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write the page of the runs and return its path. Raises DataError, FileNotFoundError and OSError."""
    if len(folders) > _MAX_RUNS:
        raise DataError(f"expected at most {_MAX_RUNS} runs to compare, got {len(folders)}: more lines cannot be distinguished")
    runs = dict(zip(_names(folders), map(load_run, folders), strict=True))
    page = ReportPage(
        title=f"{len(runs)} runs",
        subtitle=f"megatron_rl · {', '.join(runs)} · written {time.strftime('%Y-%m-%d %H:%M:%S %Z')}",
        headline=(),
        checks=tuple(_checks(runs)),
        tables=(_run_table(runs), _recipe_table(runs)),
        sections=tuple(section for section in (*_overlays(runs), _side_by_side(runs)) if section.panels),
        summary=(),
        config_text="",
    )
    return write_atomic(path, render(page))


def _names(folders: Sequence[str | Path]) -> list[str]:
    """The shortest distinct names: the folder's name, with as many parents as needed."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise DataError("expected different runs to compare, got a folder twice")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _checks(runs: Mapping[str, RunRecord]) -> list[HealthCheck]:
    """Checks that need attention, of all runs."""
    checks = [
        HealthCheck(f"{name}: {check.title}", check.state, check.detail)
        for name, run in runs.items()
        for check in health_checks(run)
        if check.state == "look"
    ]
    return checks or [HealthCheck("All checks passed in all runs", "good", "")]


def _run_table(runs: Mapping[str, RunRecord]) -> ReportTable:
    header: tuple[str, ...] = (
        "run", "steps", "reward", "evaluation", "time", "per step", "tokens/s", "servers idle", "trainer idle", "memory",
    )  # fmt: skip
    rows: tuple[tuple[str, ...], ...] = tuple(
        (
            name,
            str(int(run.steps[-1])) if len(run.steps) else "0",
            _last(run, "reward/mean", lambda value: f"{value:.3f}"),
            _evaluation(run),
            duration(run.hours()[-1] * 3600) if len(run.steps) else "",
            _median(run, "step/time_s", lambda value: f"{value:.3g} s"),
            _median(run, "step/tokens_per_s", compact),
            _median(run, "time/rollout_idle_share", lambda value: f"{value:.0%}"),
            _median(run, "time/trainer_idle_share", lambda value: f"{value:.0%}"),
            _peak(run),
        )
        for name, run in runs.items()
    )
    # Drop columns without data in any run.
    used = [index for index in range(len(header)) if any(row[index] for row in rows)]
    header, rows = tuple(header[index] for index in used), tuple(tuple(row[index] for index in used) for row in rows)
    says = "Reward: smoothed over the last steps. Times and shares: medians. Memory: the rank and stage that used the most."
    return ReportTable("Runs", says, header, rows, COLORS[: len(rows)])


def _last(run: RunRecord, metric: str, show: Callable[[float], str]) -> str:
    values = run.finite(metric)
    return show(float(smooth(values, smoothing_span(len(values)))[-1])) if len(values) else ""


def _median(run: RunRecord, metric: str, show: Callable[[float], str]) -> str:
    values = run.finite(metric)
    return show(float(np.median(values))) if len(values) else ""


def _evaluation(run: RunRecord) -> str:
    evaluated = np.flatnonzero(np.isfinite(run.values("eval/accuracy")))
    if not len(evaluated):
        return ""
    error = float(run.values("eval/accuracy_stderr")[evaluated[-1]])
    return accuracy_text(float(run.values("eval/accuracy")[evaluated[-1]]), error if math.isfinite(error) else None)


def _peak(run: RunRecord) -> str:
    for kind in ("device", "host"):
        peaks = [run.finite(name).max(initial=0.0) for name in run.columns if name.endswith(f"_{kind}_gib")]
        if max(peaks, default=0.0) > 0:
            return f"{max(peaks):.3g} GiB ({kind})"
    return ""


def _recipe_table(runs: Mapping[str, RunRecord]) -> ReportTable:
    """Keys in which the recipes differ; a recipe that lacks a key is from another version."""
    recipes = {
        name: {key: _as_in_yaml(value) for key, value in flat_params(run.config).items()} for name, run in runs.items()
    }
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe)
    rows = []
    for key in keys:
        values = [recipe.get(key, _MISSING) for recipe in recipes.values()]
        if len(set(values)) > 1 and key not in _NOT_COMPARED:
            rows.append((key, *values))
    rows.sort(key=lambda row: _MISSING in row)  # keys of other versions come last
    if all(not recipe for recipe in recipes.values()):
        says = "No run has a config.yaml."
    else:
        says = "" if rows else "The recipes are the same except for the folder."
    return ReportTable("Differences between the recipes", says, ("key", *runs), tuple(rows), header_colors=("", *COLORS[: len(runs)]))


def _as_in_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class _Chart:
    """A chart of one metric over all runs."""

    title: str
    metric: str
    unit: str
    percent: bool = False
    log: bool = False
    smoothed: bool = False
    points: bool = False
    floor: float = -math.inf


def _overlays(runs: Mapping[str, RunRecord]) -> list[ReportSection]:
    """The report's charts, one per line of each panel."""
    sections = [ReportSection("Over training time", _panels(runs, _OVER_TIME, over_time=True))]
    for title, specs in SECTIONS:
        wanted = []
        for spec in specs:
            lines = [line for line in spec.lines if line.style != "faint" and _is_logged(runs, line.metric)]
            for line in lines:
                name = spec.title if len(lines) == 1 else f"{spec.title}: {line.label}"
                is_points = line.style == "points"
                wanted.append(_Chart(name, line.metric, spec.unit, spec.percent, spec.log, line.smoothed, is_points, spec.floor))
        sections.append(ReportSection(title, _panels(runs, wanted)))
    return [*sections, ReportSection("Idle", _panels(runs, _IDLE))]


_OVER_TIME = (
    _Chart("Reward", "reward/mean", "reward", smoothed=True),
    _Chart("Training accuracy", "reward/accuracy", "% correct", percent=True, smoothed=True),
    _Chart("Evaluation accuracy", "eval/accuracy", "% correct", percent=True, points=True),
)
_IDLE = (
    _Chart("Idle share: servers", "time/rollout_idle_share", "% of the step", percent=True, smoothed=True),
    _Chart("Idle share: trainer ranks", "time/trainer_idle_share", "% of the step", percent=True, smoothed=True),
)


def _is_logged(runs: Mapping[str, RunRecord], metric: str) -> bool:
    return any(len(run.finite(metric)) for run in runs.values())


def _panels(runs: Mapping[str, RunRecord], wanted: Sequence[_Chart], *, over_time: bool = False) -> tuple[ReportPanel, ...]:
    return tuple(_overlay(runs, chart, over_time) for chart in wanted if _is_logged(runs, chart.metric))


def _overlay(runs: Mapping[str, RunRecord], chart: _Chart, over_time: bool) -> ReportPanel:
    longest_h = max((float(run.hours()[-1]) for run in runs.values() if len(run.steps)), default=0.0)
    unit, units_per_h = ("hours", 1.0) if longest_h >= _MINUTES_UP_TO_H else ("minutes", 60.0)
    series, legend = [], []
    for (name, run), color in zip(runs.items(), COLORS, strict=False):
        present = np.isfinite(run.values(chart.metric))
        values = run.values(chart.metric)[present] * (100.0 if chart.percent else 1.0)
        if chart.log:
            values = np.where(values == 0, np.nan, np.abs(values))
        if not np.isfinite(values).any():
            continue
        if chart.smoothed:
            values = smooth(values, smoothing_span(len(run.steps)))
        positions = (run.hours() * units_per_h if over_time else run.steps)[present]
        series.append(Series(name, color, positions, np.maximum(values, chart.floor), "points" if chart.points else "line"))
        legend.append((name, color))
    if not series:
        return ReportPanel(chart.title, "", "", missing="Every value is 0.")
    x_label = f"{unit} of training" if over_time else "training step"
    svg = charts.line_chart(series, chart.unit, log=chart.log, x_label=x_label)
    return ReportPanel(chart.title, "Smoothed." if chart.smoothed else "", svg, tuple(legend))


def _side_by_side(runs: Mapping[str, RunRecord]) -> ReportSection:
    """Panels of lengths, stage times and memory of each run."""
    panels = []
    late = [(name, color, early_and_late_lengths(run)[1]) for (name, run), color in zip(runs.items(), COLORS, strict=False)]
    lengths = [one for one in late if len(one[2])]
    if lengths:
        svg = charts.histogram_chart([(color, values) for _, color, values in lengths], "tokens")
        legend = tuple((f"{name}, median {compact(float(np.median(values)))}", color) for name, color, values in lengths)
        panels.append(ReportPanel("Lengths", "Tokens of the responses that finished in the last fifth of the recorded steps.", svg, legend))
    for title, says, pattern, unit in (
        ("Stage times", "Median seconds of a stage; stages overlap.", "time/{}_s", "seconds"),
        ("Device memory", "Maximum over the run, on the rank that used the most.", "memory/{}_device_gib", "GiB"),
        ("Host memory", "Maximum over the run, on the rank that used the most.", "memory/{}_host_gib", "GiB"),
    ):
        pick = np.median if title == "Stage times" else np.max
        stages = [row.name for row in ROWS if any(run.finite(pattern.format(row.name)).any() for run in runs.values())]
        groups = []
        for run, color in zip(runs.values(), COLORS, strict=False):
            by_stage = [run.finite(pattern.format(stage)) for stage in stages]
            groups.append((color, [float(pick(values)) if len(values) else math.nan for values in by_stage]))
        if stages:
            chart = charts.bar_chart(stages, groups, unit)
            panels.append(ReportPanel(title, says, chart, tuple(zip(runs, COLORS, strict=False)), wide=True))
    return ReportSection("Side by side", tuple(panels))
