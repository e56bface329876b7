"""Shows other processes what this process is doing: its own status notes and the stacks of its threads.

``enable_probe`` creates a file in memory that stays open in the process. Its first ``_NOTE_BYTES`` are the notes that
``set_status`` writes. At the signal ``ASK`` Python's faulthandler appends the stacks of all threads, even while a library call
does not return. ``probe`` reads both from another process of the same user on this machine. A process without such a file
gets no signal, because the signal would end it.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ASK = signal.SIGUSR2
_NAME = "megatron_rl-doing"
_NOTE_BYTES = 4096
_MAX_TEXT = 300
_ANSWER_S = 2.0
"""Time limit for stacks; a process that is not stopped writes them within milliseconds."""
_QUIET_S = 0.05
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

_memory = -1
_role = ""
_notes: dict[str, tuple[str, float]] = {}


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class ProcessSnapshot:
    """The state of a process at one moment."""

    pid: int
    host: str
    role: str = ""
    """Role that the process gave itself; empty if its probe is not enabled."""
    command: str = ""
    """Command line of the process."""
    state: str = ""
    """State as psutil names it (running, sleeping, stopped, ...); gone if there is no such process."""
    cpu_share: float = 0.0
    """Fraction of one core used while the process was observed."""
    notes: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Maps each key to (text of the note, Unix time at which it was set)."""
    frames: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first; empty if the process wrote none."""
    text: str = ""
    """Stacks of all threads, as faulthandler writes them."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ProcessSnapshot":
        notes = {key: (text, since_s) for key, (text, since_s) in values["notes"].items()}
        return cls(**{**values, "notes": notes, "frames": tuple(Frame(**frame) for frame in values["frames"])})


def enable_probe(role: str) -> None:
    """Let ``probe`` see this process and processes forked from it. A further call changes the role."""
    global _memory, _role
    first, _role = _memory < 0, role
    if first:
        os.register_at_fork(after_in_child=_reopen_after_fork)
        _open()
    _write()


def set_status(key: str, text: str = "") -> None:
    """Set this process's status note ``key``, which ``probe`` shows to other processes; an empty text removes the note."""
    if text:
        _notes[key] = (text[:_MAX_TEXT], time.time())
    else:
        _notes.pop(key, None)
    if _memory >= 0:
        _write()


def _reopen_after_fork() -> None:
    """Create an own file after a fork, because the inherited one belongs to the parent."""
    with contextlib.suppress(OSError):
        os.close(_memory)
        _notes.clear()
        _open()
        _write()


def _open() -> None:
    global _memory
    _memory = os.memfd_create(_NAME)
    os.lseek(_memory, _NOTE_BYTES, os.SEEK_SET)
    faulthandler.register(ASK, file=_memory, all_threads=True, chain=False)


def _write() -> None:
    note = json.dumps({"role": _role, "main": threading.main_thread().ident, "notes": dict(_notes)}).encode()
    if len(note) < _NOTE_BYTES:
        # Of fixed length, so that a reader never sees the rest of an older note.
        os.pwrite(_memory, note.ljust(_NOTE_BYTES), 0)


# ------------------------------------------------------------------------------------------------------- from outside


def probe(pids: Iterable[int], host: str) -> list[ProcessSnapshot]:
    """Return the state of each process, with stacks if its probe is enabled. Takes about a second, or two if a process does not answer."""
    processes = {pid: _process(pid) for pid in dict.fromkeys(pids)}
    before, started_s = {pid: _cpu_s(process) for pid, process in processes.items()}, time.monotonic()
    files = {pid: _file_of(pid) for pid in processes}
    sizes = {pid: file.stat().st_size for pid, file in files.items() if file is not None}
    for pid in sizes:
        with contextlib.suppress(OSError):
            os.kill(pid, ASK)
    _wait_for_answers({pid: files[pid] for pid in sizes}, sizes)
    time.sleep(max(0.0, 0.5 - (time.monotonic() - started_s)))  # long enough to distinguish computing from waiting
    elapsed_s = time.monotonic() - started_s
    return [
        _snapshot(pid, process, host, files[pid], sizes.get(pid, 0), (_cpu_s(process) - before[pid]) / elapsed_s)
        for pid, process in processes.items()
    ]


def _snapshot(pid: int, process: psutil.Process | None, host: str, file: Path | None, size: int, cpu_share: float) -> ProcessSnapshot:
    state, command = "gone", ""
    if process is not None:
        with contextlib.suppress(psutil.Error):
            state, command = process.status(), " ".join(process.cmdline())[:_NOTE_BYTES] or process.name()
    note: dict[str, Any] = {}
    text = ""
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            content = file.read_bytes()
            note = json.loads(content[:_NOTE_BYTES])
            text = content[size:].decode(errors="replace")
    notes = {key: (what, since_s) for key, (what, since_s) in note.get("notes", {}).items()}
    frames = main_frames(text, note.get("main") or 0)
    return ProcessSnapshot(pid, host, note.get("role", ""), command, state, max(0.0, cpu_share), notes, frames, text)


def main_frames(text: str, main_thread: int) -> tuple[Frame, ...]:
    """Return the frames of ``main_thread`` from faulthandler's text, innermost first.

    If no thread has that ident, takes the last one of the text, because faulthandler writes the main thread last.
    """
    threads = dict(_threads(text))
    frames = threads.get(main_thread) or (list(threads.values())[-1] if threads else [])
    return tuple(frames)


def _threads(text: str) -> Iterator[tuple[int, list[Frame]]]:
    frames: list[Frame] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            frames = []
            yield int(found[1], 16), frames
        elif found := _FRAME.match(line):
            frames.append(Frame(found[1], int(found[2]), found[3]))


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _cpu_s(process: psutil.Process | None) -> float:
    if process is not None:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            return times.user + times.system
    return 0.0


def _file_of(pid: int) -> Path | None:
    """Find the probe's file of a process; None if its probe is not enabled."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                # The kernel appends " (deleted)" to the name.
                if os.readlink(path).startswith(f"/memfd:{_NAME}"):
                    return path
    return None


def _wait_for_answers(files: Mapping[int, Path | None], sizes: Mapping[int, int]) -> None:
    """Wait until every process has written all its stacks, at most ``_ANSWER_S``."""
    deadline_s, last, quiet_since_s = time.monotonic() + _ANSWER_S, dict(sizes), time.monotonic()
    while time.monotonic() < deadline_s:
        now = {pid: _size(file, sizes[pid]) for pid, file in files.items()}
        if now != last:
            last, quiet_since_s = now, time.monotonic()
        if all(now[pid] > sizes[pid] for pid in now) and time.monotonic() - quiet_since_s > _QUIET_S:
            return
        time.sleep(0.01)


def _size(file: Path | None, gone: int) -> int:
    """Return the file's size, or ``gone`` + 1 for a process that has ended, so that the wait does not include it."""
    try:
        return file.stat().st_size if file is not None else gone + 1
    except OSError:
        return gone + 1
