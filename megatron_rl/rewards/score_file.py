"""Scores a file of responses: JSONL in, the same rows with ``score``, ``detail`` and ``error`` out.

Invariants: rows keep their order; every row is checked before the first one is scored, so bad data is refused with
file, line and field; the output appears atomically; memory contains a few thousand rows, regardless of the file
size.

Waits: reading runs ahead of scoring by ``_BATCHES_AHEAD`` batches; writing waits for the oldest batch.

The reward's row schema validates a file's rows and converts them to items to score.
"""

import concurrent.futures
import contextlib
import json
import math
import re
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_rl.data.row_files import parse_row
from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import Reward, RewardError, required_fields, resolve, row_arguments
from megatron_rl.rewards.workers.calls import CallQueue, RewardItem, RunnerSettings
from megatron_rl.rewards.workers.event_loop import start_runner
from megatron_rl.system.command_line.terminal import progress_bar
from megatron_rl.system.files.atomic_files import atomic_text_file

Row = dict[str, Any]


@dataclass(frozen=True)
class RowSchema:
    """Row schema of one reward: validates rows and converts them to items of the runner."""

    reward: Reward
    options: Mapping[str, Any]

    @property
    def fields(self) -> list[str]:
        """All keyword parameters that a row may set."""
        return [*required_fields(self.reward, self.options), *self.reward.row_fields]

    def item(self, row: Row) -> RewardItem:
        answer = row.get("answer")
        return row["response"], "" if answer is None else str(answer), row_arguments(self.reward, self.options, row)

    def problem(self, row: Any) -> str:
        """Description of a row's first problem, or ""."""
        if not isinstance(row, dict):
            return f"expected a JSON object, got {type(row).__name__}"
        needed = ("response", "answer") if self.reward.answer_required else ("response",)
        for name in (*needed, *required_fields(self.reward, self.options)):
            if name not in row:
                return f"field {name!r} is missing; the row has {sorted(row)}"
        if not isinstance(row["response"], str):
            return f"field 'response': expected text, got {type(row['response']).__name__}"
        if "answer" in needed and (not isinstance(row["answer"], (str, int, float)) or isinstance(row["answer"], bool)):
            return f"field 'answer': expected text or a number, got {type(row['answer']).__name__}"
        if isinstance(row.get("answer"), float) and not math.isfinite(row["answer"]):
            return f"field 'answer': expected text or a number, got {row['answer']}"
        return ""


_BATCH_ROWS = 1024
_BATCHES_AHEAD = 2
"""Batches submitted ahead, so that workers stay busy while results are written."""
_MAX_REPORTED = 5
"""Largest number of bad rows in an error message, and of error kinds in a summary."""
_MAX_ERROR_CHARS = 80


@dataclass
class ScoreSummary:
    """Sums over the scores of a file; rows are not stored, because files may be long."""

    reward: str
    num_rows: int = 0
    num_unscored: int = 0
    seconds: float = 0.0
    """Wall-clock seconds of the scoring, without the start of the workers."""
    _total: float = 0.0
    _metrics: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Maps a metric to (count, sum)."""
    _errors: Counter[str] = field(default_factory=Counter)

    def add(self, score: Score) -> None:
        self.num_rows += 1
        if score.value is not None:
            self._total += score.value
        else:
            self.num_unscored += 1
            # Merge errors that differ only in numbers.
            self._errors[re.sub(r"\d+", "N", score.error)[:_MAX_ERROR_CHARS]] += 1
        for key, number in score.metrics.items():
            count, total = self._metrics.get(key, (0, 0.0))
            self._metrics[key] = (count + 1, total + number)

    @property
    def mean_score(self) -> float | None:
        """Mean over the scored rows; None if there are none."""
        num_scored = self.num_rows - self.num_unscored
        return self._total / num_scored if num_scored else None

    @property
    def metrics(self) -> dict[str, float]:
        """Means of additional reward metrics, each over the rows that have it."""
        return {key: total / count for key, (count, total) in self._metrics.items()}

    @property
    def errors(self) -> dict[str, int]:
        """Most frequent reasons of unscored rows, with their counts."""
        return dict(self._errors.most_common(_MAX_REPORTED))

    @property
    def rows_per_second(self) -> float:
        return self.num_rows / self.seconds if self.seconds > 0 else 0.0

    def table(self) -> Table:
        table = Table(title=f"reward {self.reward}", show_header=False)
        mean = "-" if self.mean_score is None else f"{self.mean_score:.4f}"
        for label, value in (
            ("rows", f"{self.num_rows:,}"),
            ("mean score", mean),
            ("unscored", f"{self.num_unscored:,}"),
            ("rows per second", f"{self.rows_per_second:,.0f}"),
            *((f"mean {name}", f"{value:.4f}") for name, value in self.metrics.items()),
            *((f"unscored: {error}", f"{count:,}") for error, count in self.errors.items()),
        ):
            table.add_row(label, value)
        return table


def score_file(
    name: str,
    input_path: str | Path,
    output_path: str | Path,
    *,
    num_workers: int = 2,
    max_concurrency: int = 256,
    timeout_s: float = 5.0,
    options: Mapping[str, Any] | None = None,
) -> ScoreSummary:
    """Score every row of a JSONL file.

    Args:
        name: Registry name or import path of the reward.
        input_path: A file or a pipe. Rows with ``response`` and ``answer`` (some rewards need none), and a field for every option that the
            reward requires and ``options`` does not set.
        output_path: May be the input itself.
        num_workers: Worker processes, for a reward that runs on the CPU.
        max_concurrency: Rows in progress, for a reward that calls a server.
        timeout_s: Time limit of one row in seconds.
        options: Keyword arguments of the reward.

    Raises:
        RewardError: unknown reward, wrong options, or bad rows (with file, line and field).
        OSError: a file that cannot be read or written.
    """
    form = RowSchema(resolve(name), options or {})
    with _readable_twice(Path(input_path)) as rows_path:
        num_rows = _checked_rows(rows_path, str(input_path), form)
        with (
            start_runner(
                name,
                RunnerSettings(num_workers=num_workers, timeout_s=timeout_s, max_concurrency=max_concurrency),
                options=options,
                row_fields=form.fields,
            ) as runner,
            atomic_text_file(Path(output_path)) as output,
            progress_bar(f"reward {name}", num_rows) as advance,
        ):
            summary = ScoreSummary(name)
            started_at = time.monotonic()
            for row, score in _scored_rows(runner, rows_path, form):
                result = {**row, "score": score.value, "detail": score.detail, "error": score.error}
                output.write(json.dumps(result) + "\n")
                summary.add(score)
                advance()
            summary.seconds = time.monotonic() - started_at
    return summary


@contextlib.contextmanager
def _readable_twice(path: Path) -> Iterator[Path]:
    """Yield ``path``, or a copy of a pipe's content: rows are checked before they are scored, so they are read twice."""
    if path.is_file() or path.is_dir() or not path.exists():
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as copy, path.open("rb") as pipe:
        shutil.copyfileobj(pipe, copy)
        copy.flush()
        yield Path(copy.name)


def _scored_rows(runner: CallQueue, path: Path, form: RowSchema) -> Iterator[tuple[Row, Score]]:
    """Yields the rows of a file with their scores, in order."""
    waiting: deque[tuple[list[Row], concurrent.futures.Future[list[Score]]]] = deque()
    for batch in _batches(path, form):
        items = [form.item(row) for row in batch]
        waiting.append((batch, runner.submit(items)))
        if len(waiting) > _BATCHES_AHEAD:
            rows, future = waiting.popleft()
            yield from zip(rows, future.result(), strict=True)
    for rows, future in waiting:
        yield from zip(rows, future.result(), strict=True)


def _batches(path: Path, form: RowSchema) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for _, row, _ in _read(path, form):
        batch.append(row)
        if len(batch) == _BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _read(path: Path, form: RowSchema) -> Iterator[tuple[int, Row, str]]:
    """Yields (line number from 1, row, problem or ""); blank lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row, problem = parse_row(line, is_first=number == 1)
            yield number, row, problem or form.problem(row)


def _checked_rows(path: Path, name: str, form: RowSchema) -> int:
    """Validate all rows of the file and return their number. Raises RewardError, listing bad rows as ``name``:line, if any is bad."""
    num_good, num_bad = 0, 0
    reported: list[str] = []
    for number, _, problem in _read(path, form):
        if not problem:
            num_good += 1
            continue
        num_bad += 1
        if len(reported) < _MAX_REPORTED:
            reported.append(f"{name}:{number}: {problem}")
    if num_bad:
        listed = "\n".join(reported)
        raise RewardError(f"{num_bad} of {num_good + num_bad} rows are bad; fix them, or remove them from the file:\n{listed}")
    return num_good
