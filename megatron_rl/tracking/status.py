"""``status.json``: whether a run lives and what it is doing right now, for whoever looks at its folder.

    {"state": "running", "host": "node7", "pid": 4711, "written_s": 1732180000.1, "stages": [["generate", 12.3]], ...}

The driver's thread ``status`` writes it every ``EVERY_S`` seconds, in one move; a file that has not changed for
``SILENT_S`` belongs to a run that is dead, for a killed process cannot say so. A reader needs only the file: no lock, no
process of the same machine, no right to write. Writing never raises into training.
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
"""Many times ``EVERY_S``: a driver inside a library's long call, a slow file system and clocks that differ are no death."""
_FILE = "status.json"
_MAX_REASON_CHARACTERS = 2000


class StatusFile:
    """Of one run, in its folder. ``look`` is called on the thread and gives what there is to say besides the state."""

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
        """The first step begins."""
        with self._changed:
            self._state = "running"
            self._changed.notify()

    def end(self, state: str, reason: str = "") -> None:
        """finished, stopped (a signal; it can go on) or failed. Safe to call twice: the first call counts."""
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
            # A folder that has gone or a disk that is full is the metrics file's to complain about.
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
        # Not synced to the disk: an old status after a power cut harms nobody, and a sync may take seconds.
        partial = self._path.with_name(f".{_FILE}.partial")
        partial.write_text(json.dumps(record, default=str))
        os.replace(partial, self._path)


@dataclass(frozen=True)
class RunStatus:
    """What a reader makes of the file."""

    state: str
    """starting, running, finished, stopped, failed, dead, or unknown where there is no readable file."""
    words: str
    """About the state, for people: why it failed, since when it is silent."""
    written_s: float = 0.0
    """Unix time of the driver's clock."""
    place: str = ""
    """host:pid of the driver."""
    started_s: float | None = None
    """Unix time."""
    step: int | None = None
    """Steps done."""
    stages: Sequence[tuple[str, float]] = ()
    """In progress: name and seconds so far."""
    warnings: Sequence[str] = ()
    """The newest ones."""
    num_warnings: int = 0


def read_status(folder: str | Path, *, now_s: float | None = None) -> RunStatus:
    """Never raises: a folder that holds no readable file is unknown."""
    now_s = time.time() if now_s is None else now_s
    try:
        record = json.loads((Path(folder) / _FILE).read_text())
        place, written_s = f"{record['host']}:{record['pid']}", float(record["written_s"])
        state, words = _judge(record, now_s - written_s)
        since_s = max(0.0, now_s - written_s) if state == "running" else 0.0
        return RunStatus(
            state,
            words,
            written_s=written_s,
            place=place,
            started_s=float(record["started_s"]),
            step=record.get("step"),
            stages=[(str(name), float(seconds) + since_s) for name, seconds in record.get("stages", ())],
            warnings=[str(text) for text in record.get("warnings", ())],
            num_warnings=int(record.get("num_warnings", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return RunStatus("unknown", "no readable status.json: the run has not begun, or an earlier version wrote it")


def _judge(record: Mapping[str, Any], silent_s: float) -> tuple[str, str]:
    """State and words."""
    state = str(record["state"])
    if state not in ("starting", "running"):
        return state, str(record.get("reason", ""))
    from_here = record["host"] == socket.gethostname()
    # Its own process is gone: no need to wait. A pid says nothing inside another container, so it only counts with silence.
    if silent_s > SILENT_S or (from_here and silent_s > 3 * EVERY_S and not psutil.pid_exists(int(record["pid"]))):
        return "dead", f"no sign of life for {round(silent_s)} s; it was {state} and did not say why it ended (killed?)"
    return state, ""
