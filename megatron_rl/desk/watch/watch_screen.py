"""Draws the screen of `megatron-rl watch`: one run in one to three columns, fitted to the terminal.

Metrics that the run has not logged are omitted. Sparklines show the whole run, from its first step to its newest.
"""

from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from megatron_rl.desk.report.health_checks import health_checks, recent_mean
from megatron_rl.desk.report.run_record import RunRecord
from megatron_rl.desk.watch.run_view import RunView
from megatron_rl.system.command_line.terminal import LINES, ONE_LINE
from megatron_rl.tracking.console import compact, duration, evaluation_text, labelled_row, sparkline, stage_rows

_STATE_STYLES = {
    "starting": "cyan",
    "running": "green",
    "finished": "blue",
    "stopped": "yellow",
    "failed": "red",
    "dead": "red",
    "unknown": "bright_black",
}
_TWO_COLUMNS_FROM, _THREE_COLUMNS_FROM = 76, 132
_LABEL_CELLS, _VALUE_CELLS, _RANGE_CELLS = 13, 9, 22


_MetricCell = tuple[str, str, Callable[[float], str]]
"""(metric, label, its value as text)"""


def _percent(value: float) -> str:
    return f"{value:.1%}" if value == 0 or abs(value) >= 0.001 else f"{100 * value:.1g}%"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else duration(value)


def _gib(value: float) -> str:
    return f"{value:.3g} GiB"


def _count(value: float) -> str:
    return f"{value:.0f}"


_SECTIONS: tuple[tuple[str, tuple[_MetricCell, ...]], ...] = (
    (
        "learning",
        (
            ("reward/mean", "reward", lambda value: f"{value:.3f}"),
            ("reward/accuracy", "accuracy", _percent),
            ("eval/accuracy", "evaluation", _percent),
            ("rollout/response_tokens_mean", "length", compact),
            ("rollout/response_tokens_max", "longest", compact),
            ("rollout/finished_share", "finished", _percent),
        ),
    ),
    (
        "policy and critic",
        (
            ("policy/entropy", "entropy", compact),
            ("policy/kl", "KL", compact),
            ("kl/reference_per_token", "reference KL", compact),
            ("policy/clip_fraction", "clipped", _percent),
            ("policy/grad_norm", "grad norm", compact),
            ("critic/explained_variance", "explained var", compact),
        ),
    ),
    (
        "speed",
        (
            ("step/time_s", "step", _seconds),
            ("step/tokens_per_s", "tokens/s", compact),
            ("time/rollout_idle_share", "servers idle", _percent),
            ("time/trainer_idle_share", "trainer idle", _percent),
            ("sync/seconds", "publish", _seconds),
        ),
    ),
    (
        "engines",
        (
            ("mismatch/k3", "mismatch k3", compact),
            ("mismatch/max_abs_log_ratio", "worst token", compact),
            ("rollout/staleness_mean", "staleness", compact),
            ("sync/version", "weights", _count),
            ("rollout/num_live_servers", "servers", _count),
            ("rollout/num_server_restarts", "restarts", _count),
        ),
    ),
)


class ClippedToHeight:
    """Clips its content to the terminal's height; the last line reports the number of missing lines."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        if len(lines) > console.height:
            num_missing = len(lines) - console.height + 1
            hint = Segment(f"{num_missing} more lines (enlarge the terminal or use --once)", Style(dim=True))
            lines = [*lines[: console.height - 1], [hint]]
        for index, line in enumerate(lines):
            yield from line
            if index < len(lines) - 1:
                yield Segment.line()


def screen(view: RunView, width: int) -> RenderableType:
    """All available information about the run, ``width`` columns wide and as high as needed; ``ClippedToHeight`` fits it to a terminal."""
    parts: list[RenderableType] = [*_head(view, width), Text(), *_alerts(view)]
    if len(view.run.steps):
        parts += [_numbers(view.run, width), Text(), *stage_rows(_newest(view.run), width), *_good(view.run)]
    elif view.status.state in ("starting", "running", "unknown"):
        parts.append(Text("No step has finished yet.", style="dim"))
    if view.log:
        name, *lines = view.log
        parts += [Text(name, style="dim"), *(Text(line.translate(LINES), overflow="ellipsis", no_wrap=True) for line in lines)]
    return Group(*parts)


def _head(view: RunView, width: int) -> list[RenderableType]:
    status, total = view.status, view.num_steps
    style = _STATE_STYLES.get(status.state, "white")
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append("● ", style=style).append(view.run.name, style="bold").append(f"  {status.state}", style=style)
    details = [str(view.run.setting("preset") or ""), str(view.run.setting("schedule.mode") or ""), status.place]
    title.append("".join(f"  {word}" for word in dict.fromkeys(filter(None, details))).translate(ONE_LINE), style="dim")
    times = []
    if len(view.run.steps):
        times.append(duration(view.run.hours()[-1] * 3600))
    elif status.started_s is not None:
        times.append(f"started {duration(view.now_s - status.started_s)} ago")
    remaining_s = view.remaining_s()
    if remaining_s is not None:
        times.append(f"{duration(remaining_s)} to go")
    progress = f"step {view.step}" + (f"/{total}" if total else "")
    cells = max(0, min(40, width - len(progress) - len("  ".join(times)) - 6)) if total else 0
    filled = round(cells * view.share_done())
    line = Text(f"{progress}  ", no_wrap=True, overflow="ellipsis")
    line.append("━" * filled, style=style).append("━" * (cells - filled), style="bright_black")
    line.append("  " + "  ".join(times))
    rows: list[RenderableType] = [title, line]
    if status.words:
        rows.append(Text(status.words.translate(LINES), style=style))
    if status.state in ("starting", "running"):
        # Of several spans of one stage (two windows in flight), the longest is shown.
        running = "  ".join(f"{name} {duration(seconds)}" for name, seconds in status.stages)
        if not running:
            running = "loads models and starts servers" if status.state == "starting" else "between two stages"
        rows.append(labelled_row("now", Text(running)))
    return rows


def _numbers(run: RunRecord, width: int) -> RenderableType:
    """The sections of metrics in one to three columns, as many as fit into ``width``."""
    sections = [(title, _present(run, numbers)) for title, numbers in (*_SECTIONS, ("memory", _memory(run)))]
    sections = [(title, numbers) for title, numbers in sections if numbers]
    count = 3 if width >= _THREE_COLUMNS_FROM else 2 if width >= _TWO_COLUMNS_FROM else 1
    gap = 3
    cells = (width - gap * (count - 1)) // count
    columns: list[list[RenderableType]] = [[] for _ in range(count)]
    heights = [0] * count
    for title, numbers in sections:
        # Each section goes to the shortest column so far, which keeps the order down and across.
        column = heights.index(min(heights))
        columns[column] += [Text(), *_section(run, title, numbers, cells)] if columns[column] else _section(run, title, numbers, cells)
        heights[column] += len(numbers) + 2
    grid = Table.grid(padding=(0, gap, 0, 0))
    for _ in columns:
        grid.add_column(width=cells, no_wrap=True, overflow="crop")
    grid.add_row(*(Group(*column) for column in columns))
    return grid


def _present(run: RunRecord, numbers: Sequence[_MetricCell]) -> list[_MetricCell]:
    return [number for number in numbers if len(run.finite(number[0]))]


def _memory(run: RunRecord) -> tuple[_MetricCell, ...]:
    """Cells for the share of the node's memory in use, and for the metrics with the highest device and host peak in the last 20 steps."""
    cells: list[_MetricCell] = [("memory/host_used_share", "host used", _percent)]
    for kind in ("device", "host"):
        peaks = {
            name: float(run.finite(name)[-20:].max())
            for name in run.columns
            if name.startswith("memory/") and name.endswith(f"_{kind}_gib") and len(run.finite(name))
        }
        if peaks and max(peaks.values()) > 0:
            cells.append((max(peaks, key=lambda name: peaks[name]), f"{kind} peak", _gib))
    return tuple(cells)


def _section(run: RunRecord, title: str, numbers: Sequence[_MetricCell], cells: int) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=_LABEL_CELLS, style="dim", no_wrap=True, overflow="ellipsis")
    table.add_column(width=_VALUE_CELLS, justify="right", no_wrap=True)
    spark_cells = cells - _LABEL_CELLS - _VALUE_CELLS - 3
    with_range = spark_cells >= 2 * _RANGE_CELLS
    spark_cells -= (_RANGE_CELLS + 1) * with_range
    table.add_column(width=max(1, spark_cells), style="blue", no_wrap=True, overflow="crop")
    if with_range:
        table.add_column(width=_RANGE_CELLS, style="dim", no_wrap=True)
    for metric, label, show in numbers:
        values = run.finite(metric)
        # A single step says little, but a mean of evaluations, counts or peaks would be a number that never was.
        newest = values[-1] if metric.startswith("eval/") or show in (_count, _gib) else recent_mean(values)
        row = [label, show(float(newest)), sparkline(_condensed(values, max(1, spark_cells)), max(1, spark_cells))]
        if with_range:
            low, high = show(float(values.min())), show(float(values.max()))
            row.append(f"{low} to {high}" if low != high else "")
        table.add_row(*row)
    return [Text(title, style="bold"), table]


def _condensed(values: np.ndarray, cells: int) -> list[float]:
    """Means of at most ``cells`` intervals of equal size."""
    return [float(interval.mean()) for interval in np.array_split(values, min(cells, len(values)))]


def _newest(run: RunRecord) -> dict[str, float]:
    """Metrics of the last finished step (rows without step/time_s are evaluations alone); of the last row if no step has finished."""
    rows = np.flatnonzero(np.isfinite(run.values("step/time_s")))
    row = rows[-1] if len(rows) else len(run.steps) - 1
    return {name: float(values[row]) for name, values in run.columns.items() if np.isfinite(values[row])}


def _alerts(view: RunView) -> list[RenderableType]:
    """Urgent items: checks that need attention and the newest warnings."""
    rows = [
        Text.assemble(("! ", "red"), check.title, (f"  {check.detail}", "dim"))
        for check in health_checks(view.run)
        if check.state == "look"
    ]
    rows += [Text.assemble(("! ", "yellow"), text.translate(ONE_LINE)) for text in view.status.warnings[-3:]]
    more = view.status.num_warnings - len(view.status.warnings[-3:])
    if more > 0:
        rows.append(Text(f"  and {more} warnings before", style="dim"))
    return [*rows, Text()] if rows else []


def _good(run: RunRecord) -> list[RenderableType]:
    """The last evaluation, and the titles of passed checks."""
    rows: list[RenderableType] = []
    evaluated = np.flatnonzero(np.isfinite(run.values("eval/accuracy")))
    if len(evaluated):
        row = evaluated[-1]
        numbers = {name: float(values[row]) for name, values in run.columns.items() if np.isfinite(values[row])}
        rows.append(labelled_row("eval", Text(f"{evaluation_text(numbers)} at step {run.steps[row]}")))
    good = [check.title for check in health_checks(run) if check.state == "good"]
    if good:
        rows.append(labelled_row("ok", Text(", ".join([good[0], *(_lower(title) for title in good[1:])]))))
    return rows


def _lower(title: str) -> str:
    return title[:1].lower() + title[1:]
