"""Writes a run to TensorBoard: event files in the run's folder ``tensorboard``.

Each start or resume rewrites the files from ``metrics.jsonl``, so that each step appears once, regardless of
earlier kills and rollbacks.
"""

import contextlib
import importlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.tracking.metrics_file import MetricsRow

_SUFFIX = ".megatron_rl"
"""Suffix of event files written here; no other files are removed."""


class TensorBoardStore:
    """Event files for ``tensorboard --logdir``; give it the common folder of several runs to see them all."""

    name, key = "TensorBoard", "tracking.tensorboard=false"

    def __init__(self, output_dir: str | Path) -> None:
        self._folder = Path(output_dir) / "tensorboard"
        self.place = str(self._folder)
        self._events: Any = None
        self._writer: Any = None

    def open(self) -> None:
        writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = list(self._folder.glob(f"events.out.tfevents.*{_SUFFIX}"))
        self._writer = writers.EventFileWriter(str(self._folder), filename_suffix=f".{time.time_ns()}{_SUFFIX}")
        for path in earlier:
            path.unlink(missing_ok=True)

    def send(self, rows: Sequence[MetricsRow]) -> str:
        for row in rows:
            event = self._events.Event(wall_time=row.time_s, step=row.step)
            for name, value in row.metrics.items():
                with contextlib.suppress(OverflowError):  # the value does not fit float32
                    event.summary.value.add(tag=name, simple_value=value if math.isfinite(value) else math.nan)
            self._writer.add_event(event)
        self._writer.flush()
        return ""

    def send_file(self, path: Path) -> str:
        return ""  # files are next to the event folder already

    def close(self, status: str) -> None:
        self._writer.close()
