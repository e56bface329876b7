"""Writes ``comparison.html``: several runs on one page.

The page has the report's charts with a line per run, the keys in which the recipes differ, and lengths, stage
times and memory side by side. The runs' folders are only read.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.load import flat_params
from megatron_rl.desk.report import charts
from megatron_rl.desk.report.charts import Series
from megatron_rl.desk.report.health_checks import HealthCheck, health_checks, recent_mean, smooth, smoothing_span
from megatron_rl.desk.report.html_page import ReportPage, ReportPanel, ReportSection, ReportTable, render
from megatron_rl.desk.report.resource_panels import early_and_late_lengths
from megatron_rl.desk.report.run_record import RunRecord, load_run
from megatron_rl.desk.report.training_panels import SECTIONS, Curve, PanelSpec
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
    """Write the comparison of the runs in ``folders`` to ``path`` and return it.

    Raises:
        DataError: more runs than colors.
        FileNotFoundError: a folder that does not exist.
        OSError: a ``path`` that cannot be written.
    """
    if len(folders) > _MAX_RUNS:
        raise DataError(f"expected at most {_MAX_RUNS} runs to compare, got {len(folders)}: more lines cannot be distinguished")
    runs = dict(zip(_names(folders), map(load_run, folders), strict=True))
    page = ReportPage(
        title=f"{len(runs)} runs",
        subtitle=f"megatron_rl · {', '.join(runs)} · written {time.strftime('%Y-%m-%d %H:%M:%S %Z')}",
        headline=(),
        checks=tuple(_checks(runs)),
        tables=(_run_table(runs),),
        sections=tuple((section, panels) for section, panels in _sections(runs) if panels),
        appendix=(_recipe_table(runs),),
        summary=(),
        config_text="",
    )
    return write_atomic(path, render(page))


def _sections(runs: Mapping[str, RunRecord]) -> Iterator[ReportSection]:
    yield "Over training time", _panels(runs, _OVER_TIME, over_time=True)
    for title, specs in SECTIONS:
        yield title, _panels(runs, specs)
    yield "Lengths and idle times", (*_length_panel(runs), *_panels(runs, _IDLE))
    yield "Side by side", tuple(_stage_panels(runs))


def _names(folders: Sequence[str | Path]) -> list[str]:
    """The shortest distinct names: the folder's name, with as many parents as needed."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise DataError("expected different runs to compare, got a folder twice")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            # Parts that all names end with, such as "run", distinguish nothing.
            tails = zip(*(path.parts[::-1] for path in paths), strict=False)
            shared = next((index for index, parts in enumerate(tails) if len(set(parts)) > 1), 0)
            return ["/".join(path.parts[-depth : len(path.parts) - shared]) for path in paths]
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
    return show(recent_mean(values)) if len(values) else ""


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
    recipes = {name: {key: _as_in_yaml(value) for key, value in flat_params(run.config).items()} for name, run in runs.items()}
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


_OVER_TIME = (
    PanelSpec("Reward", "", "reward", (Curve("reward/mean", "", "", smoothed=True),)),
    PanelSpec("Training accuracy", "", "% correct", (Curve("reward/accuracy", "", "", smoothed=True),), percent=True),
    PanelSpec("Evaluation accuracy", "", "% correct", (Curve("eval/accuracy", "", "", "points"),), percent=True),
)
_IDLE = (
    PanelSpec("Idle share: servers", "", "% of the step", (Curve("time/rollout_idle_share", "", "", smoothed=True),), percent=True),
    PanelSpec("Idle share: trainer ranks", "", "% of the step", (Curve("time/trainer_idle_share", "", "", smoothed=True),), percent=True),
)


def _is_logged(runs: Mapping[str, RunRecord], metric: str) -> bool:
    return any(len(run.finite(metric)) for run in runs.values())


def _panels(runs: Mapping[str, RunRecord], specs: Sequence[PanelSpec], *, over_time: bool = False) -> tuple[ReportPanel, ...]:
    """The report's charts, one per line of each panel."""
    panels = []
    for spec in specs:
        lines = [line for line in spec.lines if line.style != "faint" and _is_logged(runs, line.metric)]
        for line in lines:
            title = spec.title if len(lines) == 1 else f"{spec.title}: {line.label}"
            panels.append(_overlay(runs, replace(spec, title=title), line, over_time))
    return tuple(panels)


def _overlay(runs: Mapping[str, RunRecord], spec: PanelSpec, line: Curve, over_time: bool) -> ReportPanel:
    longest_h = max((float(run.hours()[-1]) for run in runs.values() if len(run.steps)), default=0.0)
    unit, units_per_h = ("hours", 1.0) if longest_h >= _MINUTES_UP_TO_H else ("minutes", 60.0)
    series, legend = [], []
    for (name, run), color in zip(runs.items(), COLORS, strict=False):
        present = np.isfinite(run.values(line.metric))
        values = run.values(line.metric)[present] * (100.0 if spec.percent else 1.0)
        if spec.log:
            values = np.where(values == 0, np.nan, np.abs(values))
        if not np.isfinite(values).any():
            continue
        if line.smoothed:
            values = smooth(values, smoothing_span(len(run.steps)))
        positions = (run.hours() * units_per_h if over_time else run.steps)[present]
        series.append(Series(name, color, positions, np.maximum(values, spec.floor), line.style))
        legend.append((name, color))
    if not series:
        return ReportPanel(spec.title, "", "", missing="Every value is 0.")
    x_label = f"{unit} of training" if over_time else "training step"
    svg = charts.line_chart(series, spec.unit, log=spec.log, x_label=x_label)
    return ReportPanel(spec.title, "Smoothed." if line.smoothed else "", svg, tuple(legend))


def _length_panel(runs: Mapping[str, RunRecord]) -> Iterator[ReportPanel]:
    late = [(name, color, early_and_late_lengths(run)[1]) for (name, run), color in zip(runs.items(), COLORS, strict=False)]
    lengths = [one for one in late if len(one[2])]
    if lengths:
        svg = charts.histogram_chart([(color, values) for _, color, values in lengths], "tokens")
        legend = tuple((f"{name}, median {compact(float(np.median(values)))}", color) for name, color, values in lengths)
        yield ReportPanel("Lengths", "Tokens of the responses that finished in the last fifth of the recorded steps.", svg, legend)


def _stage_panels(runs: Mapping[str, RunRecord]) -> Iterator[ReportPanel]:
    """Bars of stage times and memory, one per run."""
    for title, says, pattern, unit in (
        ("Stage times", "Median seconds of a stage over the steps in which it ran; stages overlap.", "time/{}_s", "seconds"),
        ("Device memory", "Maximum over the run, on the rank that used the most.", "memory/{}_device_gib", "GiB"),
        ("Host memory", "Maximum over the run, on the rank that used the most.", "memory/{}_host_gib", "GiB"),
    ):
        pick = np.median if title == "Stage times" else np.max
        stages = [row.name for row in ROWS if any(run.finite(pattern.format(row.name)).any() for run in runs.values())]
        groups = []
        for run, color in zip(runs.values(), COLORS, strict=False):
            by_stage = [run.finite(pattern.format(stage)) for stage in stages]
            # Evaluations and checkpoints take no time in most steps, so a median over all steps would be 0.
            groups.append((color, [float(pick(values[values > 0])) if (values > 0).any() else math.nan for values in by_stage]))
        if stages:
            chart = charts.bar_chart(stages, groups, unit)
            yield ReportPanel(title, says, chart, tuple(zip(runs, COLORS, strict=False)), wide=True)
