"""Shows other processes what this process is doing: its own status note and the stacks of its threads.

``enable_probe`` makes a file in memory that the process holds open. Its first ``_NOTE_BYTES`` are a note, what the process says it is at
(``set_status``). Stacks come after it: Python's faulthandler appends those of all threads on ``ASK``, also while no Python runs
because a library's call does not return. ``probe`` reads both, of another process of the same user on this machine. A process
without such a file, which the signal would end, is not sent any.
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
"""The signal is answered in milliseconds by whatever is not stopped."""
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
    """A process, looked at once."""

    pid: int
    host: str
    role: str = ""
    """Role that the process gave itself; empty if its probe is not enabled."""
    command: str = ""
    """Command line of the process."""
    state: str = ""
    """psutil's word: running, sleeping, stopped, ...; gone where there is no such process."""
    cpu_share: float = 0.0
    """Fraction of one core used while the process was observed."""
    notes: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Key -> (what it says, since when as Unix time)."""
    frames: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first; empty if the process wrote none."""
    text: str = ""
    """All threads, as faulthandler writes them."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ProcessSnapshot":
        notes = {key: (text, since_s) for key, (text, since_s) in values["notes"].items()}
        return cls(**{**values, "notes": notes, "frames": tuple(Frame(**frame) for frame in values["frames"])})


def enable_probe(role: str) -> None:
    """From now on this process, and what is forked from it, answers ``observe``. Again: under another role."""
    global _memory, _role
    first, _role = _memory < 0, role
    if first:
        os.register_at_fork(after_in_child=_listen_again)
        _open()
    _write()


def set_status(key: str, text: str = "") -> None:
    """Say what this process is at, beside what it says under other keys; nothing: it is done with it."""
    if text:
        _notes[key] = (text[:_MAX_TEXT], time.time())
    else:
        _notes.pop(key, None)
    if _memory >= 0:
        _write()


def _listen_again() -> None:
    """After a fork: the parent's file is the parent's."""
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
    said = json.dumps({"role": _role, "main": threading.main_thread().ident, "notes": dict(_notes)}).encode()
    if len(said) < _NOTE_BYTES:
        os.pwrite(_memory, said.ljust(_NOTE_BYTES), 0)


# ------------------------------------------------------------------------------------------------------- from outside


def probe(pids: Iterable[int], host: str) -> list[ProcessSnapshot]:
    """Each process as it is now, asked for its stacks where it listens. Takes about a second, or two for those that do not answer."""
    processes = {pid: _process(pid) for pid in dict.fromkeys(pids)}
    before, started_s = {pid: _cpu_s(process) for pid, process in processes.items()}, time.monotonic()
    files = {pid: _file_of(pid) for pid in processes}
    sizes = {pid: file.stat().st_size for pid, file in files.items() if file is not None}
    for pid in sizes:
        with contextlib.suppress(OSError):
            os.kill(pid, ASK)
    _wait_for_answers({pid: files[pid] for pid in sizes}, sizes)
    time.sleep(max(0.0, 0.5 - (time.monotonic() - started_s)))  # long enough to tell what computes from what waits
    elapsed_s = time.monotonic() - started_s
    return [
        _seen(pid, process, host, files[pid], sizes.get(pid, 0), (_cpu_s(process) - before[pid]) / elapsed_s)
        for pid, process in processes.items()
    ]


def _seen(pid: int, process: psutil.Process | None, host: str, file: Path | None, size: int, cpu_share: float) -> ProcessSnapshot:
    state, command = "gone", ""
    if process is not None:
        with contextlib.suppress(psutil.Error):
            state, command = process.status(), " ".join(process.cmdline())[:_NOTE_BYTES] or process.name()
    said: dict[str, Any] = {}
    text = ""
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            content = file.read_bytes()
            said = json.loads(content[:_NOTE_BYTES])
            text = content[size:].decode(errors="replace")
    notes = {key: (what, since_s) for key, (what, since_s) in said.get("notes", {}).items()}
    frames = main_frames(text, said.get("main") or 0)
    return ProcessSnapshot(pid, host, said.get("role", ""), command, state, max(0.0, cpu_share), notes, frames, text)


def main_frames(text: str, main_thread: int) -> tuple[Frame, ...]:
    """Innermost first, of what faulthandler wrote; the last thread where none has that ident: the first one is written last."""
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
    """The memory that the process listens with."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{_NAME}"):
                    return path
    return None


def _wait_for_answers(files: Mapping[int, Path | None], sizes: Mapping[int, int]) -> None:
    """Wait until every process has written its stacks and writes no more."""
    deadline_s, last, quiet_since_s = time.monotonic() + _ANSWER_S, dict(sizes), time.monotonic()
    while time.monotonic() < deadline_s:
        now = {pid: _size(file, sizes[pid]) for pid, file in files.items()}
        if now != last:
            last, quiet_since_s = now, time.monotonic()
        if all(now[pid] > sizes[pid] for pid in now) and time.monotonic() - quiet_since_s > _QUIET_S:
            return
        time.sleep(0.01)


def _size(file: Path | None, gone: int) -> int:
    """``gone`` + 1 for a process that has ended: nobody waits for it."""
    try:
        return file.stat().st_size if file is not None else gone + 1
    except OSError:
        return gone + 1
