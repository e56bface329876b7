"""``status.json``: the state of a run and its stages in progress, for any reader of its folder.

    {"state": "running", "host": "node7", "pid": 4711, "written_s": 1732180000.1, "stages": [["generate", 12.3]], ...}

The driver's thread ``status`` replaces the file every ``EVERY_S`` seconds. A file that has not changed for
``SILENT_S`` belongs to a dead run, because a killed process cannot write its end. A reader needs only the file: no
lock, no process of the same node, no write permission. Writing never raises into training.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

EVERY_S = 2.0
SILENT_S = 60.0
"""Age of a status file from which its run counts as silent. It is many times ``EVERY_S``, so that long library calls, slow file
systems and clock differences do not look like a dead run."""
_FILE = "status.json"
_MAX_REASON_CHARACTERS = 2000


class StatusFile:
    """Writes the status of one run. The thread calls ``look`` for all fields other than the state."""

    def __init__(self, folder: str | Path, look: Callable[[], Mapping[str, Any]]) -> None:
        self._path = Path(folder) / _FILE
        self._look = look
        self._state, self._reason = "starting", ""
        self._started_s = time.time()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="status", daemon=True)
        self._thread.start()

    def training(self) -> None:
        """Set the state to running: the first step starts."""
        with self._changed:
            self._state = "running"
            self._changed.notify()

    def end(self, state: str, reason: str = "") -> None:
        """Set the final state: finished, stopped (by a signal; can resume) or failed. Only the first call counts."""
        with self._changed:
            if self._ended:
                return
            self._state, self._reason, self._ended = state, reason[:_MAX_REASON_CHARACTERS], True
            self._changed.notify()
        self._thread.join(timeout=10.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                ended = self._ended
            # A missing folder or a full disk is reported by the metrics file, so no second error is needed here.
            with contextlib.suppress(OSError):
                self._write()
            if ended:
                return
            with self._changed:
                if not self._ended:
                    self._changed.wait(EVERY_S)

    def _write(self) -> None:
        record = {
            "state": self._state,
            "reason": self._reason,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_s": self._started_s,
            "written_s": time.time(),
            **self._look(),
        }
        # No fsync: an old status after a power failure is harmless, and a sync may take seconds.
        partial = self._path.with_name(f".{_FILE}.partial")
        partial.write_text(json.dumps(record, default=str))
        os.replace(partial, self._path)


@dataclass(frozen=True)
class RunStatus:
    """A reader's view of the file."""

    state: str
    """starting, running, finished, stopped, failed, dead, or unknown without a readable file."""
    words: str
    """Explanation of the state: the reason of a failure, or the time since the last update."""
    written_s: float = 0.0
    """Unix time on the driver's clock."""
    place: str = ""
    """Driver as host:pid."""
    started_s: float | None = None
    """Unix time of the start."""
    step: int | None = None
    """Number of finished steps."""
    stages: Sequence[tuple[str, float]] = ()
    """Stages in progress: name and seconds so far."""
    warnings: Sequence[str] = ()
    """The newest warnings."""
    num_warnings: int = 0


def read_status(folder: str | Path, *, now_s: float | None = None) -> RunStatus:
    """Read the status of a run. Never raises: a folder without a readable file is unknown."""
    now_s = time.time() if now_s is None else now_s
    try:
        record = json.loads((Path(folder) / _FILE).read_text())
        place, written_s = f"{record['host']}:{record['pid']}", float(record["written_s"])
        state, reason = _judge(record, now_s - written_s)
        since_s = max(0.0, now_s - written_s) if state == "running" else 0.0
        return RunStatus(
            state,
            reason,
            written_s=written_s,
            place=place,
            started_s=float(record["started_s"]),
            step=record.get("step"),
            stages=[(str(name), float(seconds) + since_s) for name, seconds in record.get("stages", ())],
            warnings=[str(text) for text in record.get("warnings", ())],
            num_warnings=int(record.get("num_warnings", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return RunStatus("unknown", "no readable status.json: the run has not started, or an earlier version wrote the folder")


def _judge(record: Mapping[str, Any], silent_s: float) -> tuple[str, str]:
    """Returns (state, explanation)."""
    state = str(record["state"])
    if state not in ("starting", "running"):
        return state, str(record.get("reason", ""))
    from_here = record["host"] == socket.gethostname()
    # On the run's own host its missing process proves the end earlier. In another container the pid is unknown: require silence also.
    if silent_s > SILENT_S or (from_here and silent_s > 3 * EVERY_S and not psutil.pid_exists(int(record["pid"]))):
        return "dead", f"no sign of life for {round(silent_s)} s; it was {state} and left no reason (killed?)"
    return state, ""
