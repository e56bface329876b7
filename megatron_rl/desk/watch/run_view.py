"""The current state of a run, read from the files in its folder at each poll, on any node that has the folder."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.desk.report.run_record import RunRecord, extended, read_summary, read_text, record_of, run_name
from megatron_rl.tracking.metrics_file import MetricsTail
from megatron_rl.tracking.status import EVERY_S, SILENT_S, RunStatus, read_status

_SLOW_STEPS = 5
"""Multiple of the usual step time after which a run without status.json counts as silent."""
_NUM_LOG_LINES = 3
_LOG_TAIL_BYTES = 20_000
OVER = ("finished", "stopped", "failed", "dead")


@dataclass(frozen=True)
class RunView:
    """A run's records and status at one poll."""

    run: RunRecord
    status: RunStatus
    now_s: float
    log: tuple[str, ...] = ()
    """Name and last lines of the newest log file, if the run failed or died."""

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; 0 if config.yaml does not have the key."""
        number = self.run.setting("run.num_steps")
        return number if isinstance(number, int) else 0

    @property
    def step(self) -> int:
        """Number of finished steps."""
        written = int(self.run.steps[-1]) if len(self.run.steps) else 0
        return max(written, self.status.step or 0)

    def usual_step_s(self) -> float | None:
        """Median seconds of the last 20 steps."""
        seconds = self.run.finite("step/time_s")[-20:]
        return float(np.median(seconds)) if len(seconds) else None

    def share_done(self) -> float:
        """Fraction of the steps done, or of run.stop_after_s if that limit ends the run earlier."""
        of_steps = self.step / self.num_steps if self.num_steps else 0.0
        limit_s, hours = self.run.setting("run.stop_after_s"), self.run.hours()
        of_time = float(hours[-1]) * 3600 / limit_s if limit_s and len(hours) else 0.0
        return min(1.0, max(of_steps, of_time))

    def remaining_s(self) -> float | None:
        """Estimated seconds left, or None if the run is over or has no finished step."""
        usual_s = self.usual_step_s()
        if usual_s is None or not self.num_steps or self.status.state in OVER:
            return None
        in_step_s = self.now_s - float(self.run.times_s[-1]) if len(self.run.times_s) else 0.0
        # A step that takes longer than usual counts as finished.
        remaining_s = usual_s * (self.num_steps - self.step) - min(max(in_step_s, 0.0), usual_s)
        limit_s = self.run.setting("run.stop_after_s")
        if isinstance(limit_s, int | float) and limit_s > 0:
            # The step in which the limit is reached still runs to completion.
            remaining_s = min(remaining_s, limit_s - float(self.run.hours()[-1]) * 3600 + usual_s)
        return max(0.0, remaining_s)


class RunFolder:
    """Reads the folder of one run. Files may appear, grow, be replaced or vanish between two polls."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._tail = MetricsTail(self._folder / "metrics.jsonl")
        self._run = record_of(run_name(self._folder), ())
        self._config_text = ""
        self._rows = self._tail.rows
        self._num_rows = 0
        self._status = RunStatus("unknown", "")
        self._read_at_s = -math.inf
        self._clock_ahead_s = 0.0
        """Seconds by which this node's clock is ahead of the driver's, estimated from two statuses."""

    def poll(self) -> RunView:
        """Read the files again and return the run's current state."""
        now_s, config_text = time.time(), read_text(self._folder / "config.yaml")
        has_grown = self._tail.look()
        if config_text != self._config_text or self._tail.rows is not self._rows or self._repeats_a_step():
            self._config_text, self._rows = config_text, self._tail.rows
            self._run = record_of(self._run.name, self._rows, config_text=config_text)
        elif has_grown:
            self._run = extended(self._run, self._rows[self._num_rows :])
        self._num_rows = len(self._rows)
        status = self._poll_status(now_s)
        if status.state == "unknown":
            status = self._without_status(status, now_s)
        log = self._log_tail() if status.state in ("failed", "dead") else ()
        return RunView(self._run, status, now_s, log)

    def _repeats_a_step(self) -> bool:
        """True if the new rows start at a step that was already read, as after a resume or a rollback."""
        new, steps = self._rows[self._num_rows :], self._run.steps
        return bool(new) and bool(len(steps)) and new[0].step <= int(steps[-1])

    def _poll_status(self, now_s: float) -> RunStatus:
        status = read_status(self._folder, now_s=now_s - self._clock_ahead_s)
        if status.state == "unknown" and time.monotonic() - self._read_at_s < SILENT_S:
            return self._status  # a shared file system may briefly miss a file while it is replaced
        if self._status.written_s < status.written_s and self._status.written_s:
            # The status was written since the last poll: any additional age is the difference between the clocks.
            since_s = time.monotonic() - self._read_at_s + 2 * EVERY_S
            self._clock_ahead_s = max(0.0, now_s - status.written_s - since_s)
            status = read_status(self._folder, now_s=now_s - self._clock_ahead_s)
        if status.state != "unknown":
            self._status, self._read_at_s = status, time.monotonic()
        return status

    def _without_status(self, status: RunStatus, now_s: float) -> RunStatus:
        """State of a run without a readable status.json, derived from summary.json and the age of the last metrics line.

        Returns ``status`` unchanged for a run without metrics.
        """
        rows, summary = self._tail.rows, read_summary(self._folder)
        if not rows:
            return status
        if summary.get("num_steps") == rows[-1].step:
            limit_s = self._run.setting("run.stop_after_s")
            in_time = bool(limit_s) and summary.get("wall_s", 0.0) >= limit_s
            whole = in_time or summary["num_steps"] == self._run.setting("run.num_steps")
            return RunStatus("finished" if whole else "stopped", "")
        silent_s = now_s - rows[-1].time_s
        usual_s = float(np.median([row.metrics.get("step/time_s", 0.0) for row in rows[-20:]]))
        reason = f"no status.json; the last line of metrics.jsonl is {round(silent_s)} s old"
        return RunStatus("dead" if silent_s > max(_SLOW_STEPS * usual_s, 600.0) else "unknown", reason)

    def _log_tail(self) -> tuple[str, ...]:
        try:
            newest = max((self._folder / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
            with open(newest, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except (OSError, ValueError):  # ValueError: the folder has no log
            return ()
        return (f"logs/{newest.name}", *[line for line in lines if line.strip()][-_NUM_LOG_LINES:])
