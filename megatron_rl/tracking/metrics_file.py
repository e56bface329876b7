"""``metrics.jsonl``: one line of JSON for every training step, the record of a run that nothing else can lose.

    {"step": 3, "time_s": 1732180000.1, "metrics": {"reward/mean": 0.25, "policy/kl": "NaN"}}

Invariants:
- A line reaches the operating system before ``log`` returns, so ``kill -9`` costs at most the line being written.
  A torn last line is cut off when the file is opened again, and ``read_metrics`` passes over it.
- After a resume every step stands once: lines at the resumed step and later are dropped before the first new line.
- Values that JSON cannot hold are the strings "NaN", "Infinity" and "-Infinity", so that any JSON reader copes.
- Writing never raises into training: on a full disk the lines wait in memory and go out with a later one.
- A file that somebody removes or replaces is noticed at the next line, and written again whole.
Nobody waits for anybody: ``log`` formats and writes on the caller's thread (well under a millisecond).
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.system.files.atomic_files import write_atomic

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MetricsRow:
    """One line of ``metrics.jsonl``, or a part of one: what a step has logged at one moment."""

    step: int
    time_s: float
    """Unix time at which the line was logged."""
    metrics: dict[str, float]


def as_numbers(metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Plain numbers (tensors and numpy scalars of one element are converted) and the names of what is no number."""
    numbers: dict[str, float] = {}
    rejected: list[str] = []
    for name, value in metrics.items():
        if type(value) in (int, float):
            numbers[name] = value
            continue
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of more than one element
            rejected.append(name)
    return numbers, rejected


def _encode(step: int, time_s: float, numbers: Mapping[str, float]) -> bytes:
    jsonable = {name: value if math.isfinite(value) else _spelled(value) for name, value in numbers.items()}
    return json.dumps({"step": step, "time_s": time_s, "metrics": jsonable}, allow_nan=False).encode() + b"\n"


def _spelled(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _decode(line: bytes) -> MetricsRow | None:
    """None if the line is not a whole record."""
    try:
        record = json.loads(line)
        metrics = {name: float(value) for name, value in record["metrics"].items()}
        return MetricsRow(step=int(record["step"]), time_s=float(record["time_s"]), metrics=metrics)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_metrics(path: str | Path) -> list[MetricsRow]:
    """All readable rows, in the order of the file; an empty list if there is no file.

    A torn last line is passed over in silence, an unreadable line elsewhere with a warning that names its place.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _decode(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and number < len(lines):
            logger.warning("%s:%d: expected a JSON record of a step, passed over %r", path, number, line[:80])
    return rows


class MetricsTail:
    """The rows of a file that another process writes; each look reads what is new."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.rows: list[MetricsRow] = []
        self._file: tuple[int, int] = (0, 0)
        self._offset = 0

    def look(self) -> bool:
        """Whether there is something new. A file that was replaced or cut short (a resume) is read again, whole."""
        try:
            found = os.stat(self._path)
            replaced = (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset
            if replaced:
                self._file, self._offset, self.rows = (found.st_dev, found.st_ino), 0, []
            elif found.st_size == self._offset:
                return False
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:  # not there yet, or not for this moment (a shared file system)
            return False
        whole = content[: content.rfind(b"\n") + 1]  # the rest is a line that is being written
        self._offset += len(whole)
        self.rows += [row for line in whole.splitlines() if (row := _decode(line)) is not None]
        return replaced or bool(whole)


class MetricsWriter:
    """Appends one line a step to ``path``.

    ``resume_step`` is the first step that will be logged (again): lines at that step and later are dropped. None keeps
    everything and appends; 0 starts the file over. Raises OSError only from the constructor, before training begins.
    """

    def __init__(
        self, path: str | Path, *, resume_step: int | None = None, warn: Callable[[str], None] = logger.warning
    ):
        self.path = Path(path)
        self._warn = warn
        self._lines: list[bytes] = []
        """All of the file: what writes it again when somebody has removed it."""
        self._lock = threading.Lock()
        self._unwritten = b""
        self._warned: set[str] = set()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._keep_whole_lines(resume_step)
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add_to(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Give the line of ``step`` further metrics; where there is none, append a line with these."""
        with self._lock:
            for number in reversed(range(len(self._lines))):
                row = _decode(self._lines[number])
                if row is not None and row.step == step:
                    numbers, _ = as_numbers(metrics)
                    self._lines[number] = _encode(step, row.time_s, {**row.metrics, **numbers})
                    self._write_again()
                    return
        self.log(step, metrics)

    def log(self, step: int, metrics: Mapping[str, Any], *, time_s: float | None = None) -> None:
        """Append one line. What is no number is left out with one warning a name; a failed write waits for the next."""
        numbers, rejected = as_numbers(metrics)
        for name in rejected:
            self._warn_once(name, f"metric {name!r}: expected a number, got {type(metrics[name]).__name__}; left out")
        line = _encode(step, time.time() if time_s is None else time_s, numbers)
        with self._lock:
            self._notice_removal()
            self._lines.append(line)
            self._unwritten += line
            self._drain()

    def close(self) -> None:
        """Write what is waiting and close the file; safe to call twice."""
        with self._lock:
            if self._descriptor < 0:
                return
            self._drain()
            os.close(self._descriptor)
            self._descriptor = -1

    def _notice_removal(self) -> None:
        """An open file that was removed or replaced takes what is written with it."""
        try:
            found, ours = os.stat(self.path), os.fstat(self._descriptor)
            if (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return
        self._warn(f"{self.path} was removed or replaced while the run writes it; it is written again, whole")
        self._write_again()

    def _write_again(self) -> None:
        try:
            write_atomic(self.path, b"".join(self._lines))
            os.close(self._descriptor)
            self._open()
            self._unwritten = b""
        except OSError as error:
            self._warn_once("", f"cannot write {self.path} ({error}); lines wait in memory. Free space on its disk")

    def _drain(self) -> None:
        try:
            while self._unwritten:
                # A disk that fills up may take a part: the rest stays and continues the same line later.
                written = os.write(self._descriptor, self._unwritten)
                self._unwritten = self._unwritten[written:]
        except OSError as error:
            self._warn_once("", f"cannot write {self.path} ({error}); lines wait in memory. Free space on its disk")

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self._warn(text)

    def _keep_whole_lines(self, resume_step: int | None) -> None:
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = []
        for line in lines:
            row = _decode(line) if line.endswith(b"\n") else None
            if row is not None and (resume_step is None or row.step < resume_step):
                kept.append(line)
        if len(kept) < len(lines):
            write_atomic(self.path, b"".join(kept))
        self._lines = kept

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
