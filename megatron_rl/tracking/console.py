"""Shows a training run on the terminal: a live display, or plain lines without a terminal.

Invariants:
- Nothing here raises into training: a closed pipe, a terminal of two columns or one without Unicode only shows less.
- Plain lines (no terminal, CI set, TERM=dumb) have no color and no cursor movement. At most one line is printed every
  ``plain_interval_s``, except for the first step, the last step and steps with an evaluation.
- A metric that a step lacks is omitted, never shown as 0.
rich's own thread draws the live display twice per second; ``update`` only stores the values.
"""

import io
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_rl.schedule.table import in_table_order, row_of
from megatron_rl.system.command_line.terminal import LINES
from megatron_rl.tracking.metrics_file import as_numbers

_SPARKS = "▁▂▃▄▅▆▇█"
_NUM_HISTORY = 40
"""Steps behind the sparklines and the estimate of the remaining time."""
_NUM_WARNINGS = 5
_LEAST_STAGE_SHARE = 0.005
"""Fraction of the total stage time below which a stage has no label under the bar."""


class SafeStream(io.TextIOBase, TextIO):
    """Forwards text until the other end is gone, then drops it. Characters that the stream cannot encode become '?'."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only in C, an attribute in typeshed
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):  # ValueError: the stream was closed
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def _give_up(self) -> None:
        self._gone = True
        # Python flushes standard output again at exit: buffered text must find an open end, or a successful run ends with
        # exit code 120.
        try:
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, self._stream.fileno())
            os.close(descriptor)
        except (OSError, ValueError):  # no descriptor underneath (io.UnsupportedOperation is both)
            return


def duration(seconds: float) -> str:
    """Format seconds as text: 42 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def compact(value: float) -> str:
    """Format a number as short text: 1234567 as 1.23M, 0.00012 as 1.2e-04, 12.5 as 12.5."""
    size = abs(value)
    for limit, unit, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if limit <= size < float("inf"):
            return f"{value / unit:.3g}{letter}"
    if size != 0 and size < 0.001:
        return f"{value:.1e}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def sparkline(values: Sequence[float], width: int = _NUM_HISTORY) -> str:
    """The last ``width`` finite values as blocks scaled between their minimum and maximum."""
    recent = [value for value in values if abs(value) < float("inf")][-width:]  # also drops NaN, which compares false
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    if high == low:
        return _SPARKS[3] * len(recent)
    return "".join(_SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in recent)


def _stage_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """``time/<stage>_s`` metrics as {stage: seconds}, in the order of the stage table."""
    seconds_of = {
        name.removeprefix("time/").removesuffix("_s"): seconds
        for name, seconds in metrics.items()
        if name.startswith("time/") and name.endswith("_s")
    }
    return {stage: seconds_of[stage] for stage in in_table_order(seconds_of)}


def plain_line(step: int, num_steps: int, metrics: Mapping[str, float], remaining_s: float | None) -> str:
    """A step as one line of text."""
    parts = [f"step {step}/{num_steps}"]
    parts += [f"{label} {text}" for label, text in _headline(metrics)]
    stages = [f"{stage} {seconds:.1f}" for stage, seconds in _stage_times(metrics).items() if seconds >= 0.05]
    if "step/time_s" in metrics:
        detail = f" ({', '.join(stages)})" if stages else ""
        parts.append(f"{metrics['step/time_s']:.1f} s{detail}")
    if remaining_s is not None:
        parts.append(f"{duration(remaining_s)} to go")
    return "  ".join(parts)


def _headline(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Key metrics of a run as (label, text); missing ones are omitted."""
    formats: list[tuple[str, str, Callable[[float], str]]] = [
        ("reward/mean", "reward", lambda value: f"{value:.3f}"),
        ("reward/accuracy", "accuracy", lambda value: f"{value:.1%}"),
        ("eval/accuracy", "eval", lambda _: evaluation_text(metrics)),
        ("rollout/finished_share", "finished", lambda value: f"{value:.0%}"),
        ("rollout/response_tokens_mean", "length", lambda value: f"{value:.0f}"),
        ("step/tokens_per_s", "tokens/s", compact),
    ]
    return [(label, text(metrics[name])) for name, label, text in formats if name in metrics]


def accuracy_text(accuracy: float, stderr: float | None) -> str:
    """An accuracy as text, with its standard error if there is one."""
    return f"{accuracy:.1%}" if stderr is None else f"{accuracy:.1%} ± {stderr:.1%}"


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """Accuracy over all sets, and of each set by name, as text."""

    def text(prefix: str) -> str:
        return accuracy_text(metrics[f"{prefix}/accuracy"], metrics.get(f"{prefix}/accuracy_stderr"))

    sets = ", ".join(f"{name} {text(f'eval/{name}')}" for name in evaluation_sets(metrics))
    return text("eval") + (f" ({sets})" if sets else "")


def evaluation_sets(metrics: Iterable[str]) -> list[str]:
    """Return the names of the evaluation sets in metric names; ``eval/reward/...`` covers all sets and is not a set."""
    matches = (re.fullmatch("eval/([^/]+)/accuracy", name) for name in metrics)
    return [match[1] for match in matches if match and match[1] not in ("reward", "dialogue")]


def summary_table(rows: Sequence[tuple[str, Any]], title: str = "") -> Table:
    """The final summary as a table of two columns, label and value."""
    table = Table(title=title or None, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(str(label)), Text(compact(value) if isinstance(value, float) else str(value).translate(LINES)))
    return table


class TrainingConsole:
    """Displays a run from ``first_step`` to ``num_steps``. Context manager around the loop.

    ``running`` returns the stages in progress as (name, seconds so far): pass ``StageRunner.running``. ``left_s``
    returns the seconds until the run's time limit. The display is live if the terminal can draw and CI is not set.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        title: str = "",
        first_step: int = 0,
        running: Callable[[], list[tuple[str, float]]] = list,
        left_s: Callable[[], float] = lambda: math.inf,
        stream: TextIO | None = None,
        plain_interval_s: float = 2.0,
    ):
        safe_stream = SafeStream(stream or sys.stdout)
        self._rich = Console(file=safe_stream, highlight=False, soft_wrap=False)
        can_draw = self._rich.is_terminal and not self._rich.is_dumb_terminal
        is_live = can_draw and not os.environ.get("CI") and safe_stream.encoding.lower().startswith("utf")
        self._num_steps = num_steps
        self._title = title
        self._running = running
        self._left_s = left_s
        self._plain_interval_s = plain_interval_s
        self._lock = threading.Lock()  # rich's thread reads while the loop thread updates
        self._started_s = time.monotonic()
        self._last_update_s = self._started_s
        self._last_plain_s = -float("inf")
        self._step = first_step
        self._metrics: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {}
        self._evaluations: deque[tuple[int, str]] = deque(maxlen=3)
        self._warnings: deque[str] = deque(maxlen=_NUM_WARNINGS)
        self.num_warnings = 0
        """Number of warnings so far."""
        self._live = None
        if is_live:
            self._live = Live(get_renderable=self._render, console=self._rich, refresh_per_second=2, transient=True)

    def __enter__(self) -> "TrainingConsole":
        self._started_s = self._last_update_s = time.monotonic()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._rich.print(self._render())  # the live display is transient: leave a final copy on the screen

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a finished step."""
        numbers, _ = as_numbers(metrics)
        now_s = time.monotonic()
        numbers.setdefault("step/time_s", now_s - self._last_update_s)
        self._last_update_s = now_s
        with self._lock:
            self._step, self._metrics = step, numbers
            for name in ("step/time_s", "reward/mean", "reward/accuracy", "rollout/response_tokens_mean"):
                if name in numbers:
                    self._history.setdefault(name, deque(maxlen=_NUM_HISTORY)).append(numbers[name])
            if "eval/accuracy" in numbers:
                self._evaluations.append((step, evaluation_text(numbers)))
        due = now_s - self._last_plain_s >= self._plain_interval_s
        if self._live is None and (due or step >= self._num_steps or "eval/accuracy" in numbers):
            self._last_plain_s = now_s
            self._print(plain_line(step, self._num_steps, numbers, self._remaining_s()))

    def note(self, text: str) -> None:
        """Print a line that stays above the live display."""
        self._print(text)

    def warning(self, text: str) -> None:
        """Print a line that stays, mark it as a warning and count it."""
        self.num_warnings += 1
        self._warnings.append(f"{time.strftime('%H:%M:%S')} {text}")
        self._print(f"warning: {text}", style="yellow")

    @property
    def newest_warnings(self) -> list[str]:
        """Newest warnings in order, each with its time of day."""
        return list(self._warnings)

    def _print(self, text: str, style: str = "") -> None:
        # soft_wrap: a log file or a pipe gets one line, regardless of the width that rich assumes.
        self._rich.print(Text(text.translate(LINES), style=style), soft_wrap=True)

    def _remaining_s(self) -> float | None:
        times = self._history.get("step/time_s")
        if not times or self._step >= self._num_steps:
            return None
        step_s = sum(times) / len(times)
        # The step in which the time limit is reached is the last one.
        return min(step_s * (self._num_steps - self._step), max(self._left_s(), 0.0) + step_s / 2)

    def _render(self) -> RenderableType:
        with self._lock:
            return self._draw(self._rich.width)

    def _draw(self, width: int) -> RenderableType:
        parts: list[RenderableType] = [self._progress(width)]
        if self._metrics:
            parts += [self._numbers(width), *stage_rows(self._metrics, width)]
        if self._evaluations:
            recent = "  ".join(f"{accuracy} at step {step}" for step, accuracy in reversed(self._evaluations))
            parts.append(labelled_row("eval", Text(recent)))
        running = "  ".join(f"{name} {seconds:.0f} s" for name, seconds in self._running())
        if running:
            parts.append(labelled_row("now", Text(running)))
        if self.num_warnings:
            parts.append(labelled_row("warnings", Text(str(self.num_warnings), style="yellow")))
        return Group(*parts)

    def _progress(self, width: int) -> Text:
        share = min(1.0, self._step / self._num_steps) if self._num_steps else 1.0
        cells = max(0, min(30, width - 50))
        filled = round(cells * share)
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{self._title}  " if self._title else "", style="bold")
        line.append(f"step {self._step}/{self._num_steps}  ")
        line.append("━" * filled, style="blue").append("━" * (cells - filled) + "  ", style="bright_black")
        line.append(duration(time.monotonic() - self._started_s))
        remaining_s = self._remaining_s()
        if remaining_s is not None:
            line.append(f"  {duration(remaining_s)} to go", style="dim")
        return line

    def _numbers(self, width: int) -> RenderableType:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        sparks = {"reward": "reward/mean", "accuracy": "reward/accuracy", "length": "rollout/response_tokens_mean"}
        table.add_column(style="dim", no_wrap=True, min_width=8)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="blue", no_wrap=True, overflow="crop")
        for label, text in _headline(self._metrics):
            if label != "eval":  # a separate row shows the last evaluations
                history = self._history.get(sparks.get(label, ""), ())
                table.add_row(label, text, sparkline(history, max(1, min(_NUM_HISTORY, width - 24))))
        return table


def stage_rows(metrics: Mapping[str, float], width: int) -> list[RenderableType]:
    """A bar of a step's stages, and their seconds. Overlapping stages count in full."""
    times = {stage: seconds for stage, seconds in _stage_times(metrics).items() if 0 < seconds < float("inf")}
    total = sum(times.values())
    if not total:
        return []
    bar, legend = Text(no_wrap=True, overflow="crop"), [Text()]
    cells = max(1, min(60, width - 12))
    ends = [0.0]
    for stage, seconds in times.items():
        ends.append(ends[-1] + seconds)
        style = row_of(stage).style
        bar.append("█" * (round(ends[-1] / total * cells) - round(ends[-2] / total * cells)), style=style)
        if seconds < _LEAST_STAGE_SHARE * total:
            continue
        entry = Text.assemble(("■ ", style), f"{stage} {seconds:.2g} s" if seconds < 10 else f"{stage} {seconds:.0f} s")
        # Wrap here, because rich would break between a stage and its seconds.
        if legend[-1] and len(legend[-1]) + len(entry) + 2 > width - 12:
            legend.append(Text())
        legend[-1].append("  " if legend[-1] else "").append(entry)
    return [labelled_row("stages", bar), *(labelled_row("", line) for line in legend)]


def labelled_row(label: str, content: Text) -> Table:
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(style="dim", min_width=8, no_wrap=True)
    row.add_column()
    row.add_row(label, content)
    return row
