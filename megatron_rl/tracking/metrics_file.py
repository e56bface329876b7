"""``metrics.jsonl``: one line of JSON per training step. This file survives every failure of the other outputs.

    {"step": 3, "time_s": 1732180000.1, "metrics": {"reward/mean": 0.25, "policy/kl": "NaN"}}

Invariants:
- A line reaches the operating system before ``log`` returns, so ``kill -9`` costs at most the line being written.
  A torn last line is removed when the file is reopened, and ``read_metrics`` skips it.
- After a resume every step appears once: lines of the resumed step and later are dropped before the first new line.
- Values that JSON cannot represent are the strings "NaN", "Infinity" and "-Infinity", so any JSON reader works.
- Writing never raises into training: on a full disk the lines stay in memory and are written with a later one.
- If the file is removed or replaced, the next line notices that and rewrites the whole file.
No waiting on other threads: ``log`` formats and writes on the caller's thread (well under a millisecond).
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.system.files.atomic_files import write_atomic

logger = logging.getLogger(__name__)
_START = b'\n{"step": %d, '
"""End of a line and start of the next one, as ``_encode`` writes them."""


@dataclass(frozen=True)
class MetricsRow:
    """A line of ``metrics.jsonl``, or a part of a line: metrics of one step logged at the same time."""

    step: int
    time_s: float
    """Unix time at which the line was logged."""
    metrics: dict[str, float]


def as_numbers(metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Returns (plain numbers, names of other values). Tensors and numpy scalars of one element are converted."""
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
    jsonable = {name: value if math.isfinite(value) else _nonfinite_text(value) for name, value in numbers.items()}
    return json.dumps({"step": step, "time_s": time_s, "metrics": jsonable}, allow_nan=False).encode() + b"\n"


def _nonfinite_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _decode(line: bytes) -> MetricsRow | None:
    """The row of a line, or None if the line is not a complete record."""
    try:
        record = json.loads(line)
        metrics = {name: float(value) for name, value in record["metrics"].items()}
        return MetricsRow(step=int(record["step"]), time_s=float(record["time_s"]), metrics=metrics)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_metrics(path: str | Path) -> list[MetricsRow]:
    """All readable rows in the order of the file; an empty list if the file does not exist.

    A torn last line is skipped silently, any other unreadable line with a warning that names its file and line.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: str | Path) -> Iterator[MetricsRow]:
    """The rows of ``read_metrics`` one at a time, for a file that is larger than memory should hold."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            row = _decode(line)
            if row is not None:
                yield row
            elif line.strip() and line.endswith(b"\n"):
                logger.warning("%s:%d: expected a JSON record of a step, skipped %r", path, number, line[:80])


class MetricsTail:
    """Follows a metrics file that another process writes; each poll reads the new rows."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.rows: list[MetricsRow] = []
        self._file: tuple[int, int] = (0, 0)
        self._offset = 0

    def look(self) -> bool:
        """Read new rows. Returns True if there are any. A replaced or truncated file (after a resume) is read from the start."""
        try:
            stat = os.stat(self._path)
            replaced = (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._offset
            if replaced:
                self._file, self._offset, self.rows = (stat.st_dev, stat.st_ino), 0, []
            elif stat.st_size == self._offset:
                return False
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:  # the file does not exist yet, or is briefly missing on a shared file system
            return False
        whole = content[: content.rfind(b"\n") + 1]  # an incomplete last line is still being written
        self._offset += len(whole)
        self.rows += [row for line in whole.splitlines() if (row := _decode(line)) is not None]
        return replaced or bool(whole)


class MetricsWriter:
    """Appends one line per step to ``path``.

    ``resume_step`` is the first step that will be logged (again): lines of that step and later are dropped. None
    keeps all lines and appends; 0 starts an empty file. Raises OSError only from the constructor, before training
    starts.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None, warn: Callable[[str], None] = logger.warning):
        self.path = Path(path)
        self._warn = warn
        self._lock = threading.Lock()
        self._unwritten = b""
        """The end of the file that could not be written yet; the rest is only on disk."""
        self._warned: set[str] = set()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._keep_whole_lines(resume_step)
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def add_to(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the line of ``step``, or append a line if there is none."""
        with self._lock:
            content = self._content()
            start = content.rfind(_START % step) + 1
            end = content.find(b"\n", start) + 1
            row = _decode(content[start:end])
            if row is not None and row.step == step:
                line = _encode(step, row.time_s, {**row.metrics, **as_numbers(metrics)[0]})
                if self._rewrite(content[:start] + line + content[end:]):
                    return
        self.log(step, metrics)

    def log(self, step: int, metrics: Mapping[str, Any], *, time_s: float | None = None) -> None:
        """Append one line. A value that is not a number is omitted with one warning per name; a failed write is retried later."""
        numbers, rejected = as_numbers(metrics)
        for name in rejected:
            self._warn_once(name, f"metric {name!r}: expected a number, got {type(metrics[name]).__name__}; omitted")
        line = _encode(step, time.time() if time_s is None else time_s, numbers)
        with self._lock:
            self._restore_if_removed()
            self._unwritten += line
            self._drain()

    def close(self) -> None:
        """Write pending lines and close the file. Safe to call twice."""
        with self._lock:
            if self._descriptor < 0:
                return
            self._drain()
            os.close(self._descriptor)
            self._descriptor = -1

    def _restore_if_removed(self) -> None:
        """Rewrite the file if it was removed or replaced: the open descriptor would write into the removed file."""
        try:
            current, ours = os.stat(self.path), os.fstat(self._descriptor)
            if (current.st_dev, current.st_ino) == (ours.st_dev, ours.st_ino):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return
        self._warn(f"{self.path} was removed or replaced during the run; it is rewritten completely")
        self._rewrite(self._content())

    def _content(self) -> bytes:
        """All lines, also of a file that was removed: the descriptor still has them."""
        return Path(f"/proc/self/fd/{self._descriptor}").read_bytes() + self._unwritten

    def _rewrite(self, content: bytes) -> bool:
        """Replace the file. Returns False if it cannot be written."""
        try:
            write_atomic(self.path, content)
            os.close(self._descriptor)
            self._open()
            self._unwritten = b""
            return True
        except OSError as error:
            self._warn_once("", f"cannot write {self.path} ({error}); lines are kept in memory. Free space on its disk")
            return False

    def _drain(self) -> None:
        try:
            while self._unwritten:
                # A disk that fills up may accept a part: the rest stays and continues the same line later.
                written = os.write(self._descriptor, self._unwritten)
                self._unwritten = self._unwritten[written:]
        except OSError as error:
            self._warn_once("", f"cannot write {self.path} ({error}); lines are kept in memory. Free space on its disk")

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

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
