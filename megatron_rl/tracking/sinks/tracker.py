"""Sends metrics to a store (MLflow, Weights & Biases, TensorBoard) from a separate thread, so that a slow or dead store never
affects training.

Invariants:
- ``log`` and ``log_artifact`` only append to a bounded queue; they never block and never raise. If the queue is full, the
  newest entry is dropped and counted.
- A failure is one warning. The thread keeps its entries and retries with growing pauses, so a store that recovers gets
  everything still in the queue. ``metrics.jsonl`` is always complete.
- ``close`` waits at most its ``timeout_s`` for the thread; the thread is a daemon, so it never delays the exit.
The thread imports the store's library, because an import takes seconds.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.tracking.metrics_file import MetricsRow, as_numbers

logger = logging.getLogger(__name__)

MAX_METRICS_PER_REQUEST = 1000  # MLflow's limit per log_batch
_MAX_PROBLEM_CHARACTERS = 300
_MAX_QUEUE = 2000
_FIRST_RETRY_S = 2.0
_LAST_RETRY_S = 60.0


class TrackerBackend(Protocol):
    """Backend of a tracker. All methods run on the tracker's thread; a method that raises is retried, including ``open``."""

    name: str
    """Name of the store in warnings."""
    place: str
    """Address or folder, for warnings."""
    key: str
    """Configuration key that turns the store off."""

    def open(self) -> None:
        """Import the library, find or create the run. Raises ImportError if the library is missing."""

    def send(self, rows: Sequence[MetricsRow]) -> str:
        """Log rows in one batch. Returns the problem if the store rejects them as invalid, which a retry cannot fix."""

    def send_file(self, path: Path) -> str:
        """Upload a file or a folder. Returns the problem if that fails; a failure is not retried."""

    def close(self, status: str) -> None:
        """End the run: FINISHED, FAILED or KILLED."""


class Tracker:
    """Sends one run to one store. ``warn`` receives the warnings, for example the run's display."""

    def __init__(
        self,
        store: TrackerBackend,
        *,
        before: Sequence[MetricsRow] = (),
        warn: Callable[[str], None] = logger.warning,
    ):
        """``before``: rows of the run so far; the store skips those that it already has."""
        self._store = store
        # Earlier rows must not take the places of new ones.
        self._max_queue = _MAX_QUEUE + len(before)
        self._warn = warn
        self._warned = False
        self._is_open = False
        self._queue: deque[MetricsRow | Path] = deque(before)
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._final_status: str | None = None
        name = store.name.lower().replace(" & ", "-").replace(" ", "-")
        self._thread: threading.Thread | None = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any], *, time_s: float | None = None) -> None:
        """Queue the metrics of a step. ``time_s``: Unix time; pass the time of ``metrics.jsonl`` so that duplicates are recognized."""
        numbers, _ = as_numbers(metrics)
        self._put(MetricsRow(step, time.time() if time_s is None else time_s, numbers))

    def log_artifact(self, path: str | Path) -> None:
        """Queue a file. It is read when it is sent, so a file that is rewritten goes up in its newest version."""
        self._put(Path(path))

    def end(self, status: str) -> None:
        """Same as ``close`` without waiting: the thread sends the queued entries and ends the run."""
        with self._changed:
            self._final_status = status
            self._changed.notify()

    def close(self, status: str = "FINISHED", timeout_s: float = 30.0) -> None:
        """End the run (FINISHED, FAILED or KILLED). Returns after at most ``timeout_s``. Safe to call twice."""
        if self._thread is None:
            return
        self.end(status)
        self._thread.join(timeout_s)
        with self._changed:
            num_missing = len(self._queue) + self._num_dropped
        if self._thread.is_alive():
            self._warn_once(f"not finished {timeout_s:.0f} s after the end of the run")
        if num_missing:
            self._warn(
                f"{self._store.name}: {num_missing} entries did not reach {self._store.place}; metrics.jsonl has them all, "
                "and megatron_rl.tracking.sinks.all_trackers.upload_metrics sends them later"
            )
        self._thread = None

    def wait_until_sent(self, while_waiting: Callable[[], None], every_s: float = 5.0) -> None:
        """Wait until the store has received all entries, or until a warning has reported trouble."""
        next_s = time.monotonic() + every_s
        while self._thread is not None and self._thread.is_alive() and not self._warned:
            with self._changed:
                if not self._queue:
                    return
            time.sleep(0.05)
            if time.monotonic() >= next_s:
                while_waiting()
                next_s = time.monotonic() + every_s

    def _put(self, entry: MetricsRow | Path) -> None:
        if self._thread is None:
            return
        with self._changed:
            if len(self._queue) >= self._max_queue:
                self._num_dropped += 1  # drop the newest: the thread may be sending the oldest
                return
            self._queue.append(entry)
            self._changed.notify()

    def _warn_once(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"{self._store.name}: {problem} ({self._store.place}). Training continues; metrics.jsonl stays complete")

    def _work(self) -> None:
        """Connect, then send queued entries until ``close`` was called and the queue is empty. Runs on the thread."""
        pause_s = _FIRST_RETRY_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_open or self._queue or self._final_status)
                closing = self._final_status
            try:
                if not self._is_open:
                    self._store.open()
                    self._is_open = True
                self._send_queue()
                if closing:
                    self._store.close(closing)
                    return
                pause_s = _FIRST_RETRY_S
            except ImportError as error:
                self._warn_once(f"cannot import its library: {error}. Install it or set {self._store.key}")
                return
            # Any error of a store, its driver or a plugin must stay out of training: this module guarantees that.
            except Exception as error:
                self._warn_once(f"{type(error).__name__}: {shortened(str(error), _MAX_PROBLEM_CHARACTERS)}")
                if closing:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._final_status, timeout=pause_s)
                pause_s = min(2 * pause_s, _LAST_RETRY_S)

    def _send_queue(self) -> None:
        """Send entries in order. An entry leaves the queue once it was sent or the store rejected it permanently."""
        while True:
            with self._changed:
                head = self._head()
            if not head:
                return
            # Outside the lock, so that ``log`` never waits for the store.
            problem = self._store.send_file(head) if isinstance(head, Path) else self._store.send(head)
            num_sent = 1 if isinstance(head, Path) else len(head)
            if problem:
                self._warn_once(problem)
            with self._changed:
                self._num_dropped += num_sent if problem else 0
                for _ in range(num_sent):
                    self._queue.popleft()

    def _head(self) -> Path | list[MetricsRow]:
        """An artifact, or as many rows from the head of the queue as fit in one request."""
        rows: list[MetricsRow] = []
        num_metrics = 0
        for entry in self._queue:
            if isinstance(entry, Path):
                return rows or entry  # send earlier rows first, so that the store shows them in order
            num_metrics += len(entry.metrics)
            if rows and num_metrics > MAX_METRICS_PER_REQUEST:
                break
            rows.append(entry)
        return rows


def shortened(text: str, limit: int) -> str:
    """The text, or its head and tail around a note on its length; at most ``limit`` characters."""
    if len(text) <= limit:
        return text
    note = f" ... ({len(text)} characters) ... "
    tail = max(0, (limit - len(note)) // 3)
    head = max(0, limit - len(note) - tail)
    return (text[:head] + note + text[len(text) - tail :])[:limit]
