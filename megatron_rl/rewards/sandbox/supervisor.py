"""The sandbox's own process: it confines, watches and kills the processes that run untrusted code.

Started once by its client (sandbox.py), it imports what programs often need, and forks a process for each program: a
matter of a millisecond. It reads requests from the control socket one at a time.

Invariants:

- A process runs untrusted code only after every guard of the level is in place; a guard that fails is reported as the
  sandbox's failure, and the code is not run.
- After each request nothing of it is left: no process, no file.
- The supervisor parses neither tests nor verdicts: they go through a socket from the client to the referee, so no fork of the
  supervisor holds them.

Who waits for whom: the client waits for the reply, which comes at the deadline at the latest; the supervisor waits for the
referee, for the deadline, for a limit that is watched (memory, processes, disk) and for the end of the client, whichever
comes first, and then kills. Everything dies with the supervisor, the supervisor with its client.
"""

import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatron_rl.rewards.sandbox import kernel
from megatron_rl.rewards.sandbox.guards import Guards, Limits
from megatron_rl.rewards.sandbox.program import play, referee, together

HEADER = struct.Struct("!I")
_GC_THRESHOLD = 20_000
"""New objects between two collections: most programs end before the first one."""
_FAIR_SHARE = 0.1
"""A program that had less than this share of its time when the clock ran out is unscored, not failed."""
_TOO_BUSY = "the machine is too busy to run a program within its time"
_WATCH_S = 0.02
"""Between two looks at memory, processes and disk."""
_FIRST_WATCH_S = 0.1
"""Most programs have ended by then."""
_PRELOADED = (
    "abc argparse array ast base64 bisect calendar cmath collections copy csv dataclasses datetime decimal enum fractions "
    "functools hashlib heapq io itertools json logging math operator os random re statistics string struct sys textwrap "
    "threading time types typing unicodedata unittest uuid"
).split()


@dataclass
class _Child:
    pid: int
    status: int
    """Read end of a pipe: it says ``ok`` once the process is confined, and ends with the process."""


class Supervisor:
    def __init__(self, control: socket.socket, guards: Guards) -> None:
        self._control = control
        self._guards = guards

    def serve(self) -> None:
        """Answer requests until the client is gone."""
        while header := self._receive(HEADER.size):
            request = json.loads(self._receive(HEADER.unpack(header)[0]))
            reply = json.dumps(self._run(request)).encode()
            self._control.sendall(HEADER.pack(len(reply)) + reply)

    def _receive(self, size: int) -> bytes:
        """Exactly ``size`` bytes; b"" at the end of the stream."""
        parts = []
        while size:
            part = self._control.recv(size)
            if not part:
                return b""
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One program. The reply says what ended it, and how its processes ended."""
        limits, program = Limits(**request["limits"]), request["program"]
        started_at = time.monotonic()
        children: list[_Child] = []
        open_files: list[socket.socket] = []
        self._guards.prepare(limits)
        try:
            if request["together"]:
                channel = self._receive_channel(open_files)
                children.append(self._start(limits, [channel], lambda: together(program, channel)))
            else:
                ours, theirs = socket.socketpair()
                open_files += [ours, theirs]
                children.append(self._start(limits, [theirs], lambda: play(program, theirs)))
                channel = self._receive_channel(open_files)
                children.append(self._start(limits, [channel, ours], lambda: referee(channel, ours)))
            for file in open_files:
                file.close()
            deadline = started_at + limits.wall_s
            failure = next((text for child in children if (text := self._confined(child, deadline))), "")
            ended_by = "" if failure else self._wait(children, limits, started_at)
            if ended_by == _TOO_BUSY:
                failure = _TOO_BUSY
        finally:
            for file in open_files:
                file.close()
            statuses = self._guards.sweep([child.pid for child in children])
            for child in children:
                os.close(child.status)
        return {"failure": failure, "ended_by": ended_by, "statuses": statuses}

    def _receive_channel(self, open_files: list[socket.socket]) -> socket.socket:
        """The socket between the client and the referee."""
        _, files, _, _ = socket.recv_fds(self._control, 1, 1)
        channel = socket.socket(fileno=files[0])
        open_files.append(channel)
        return channel

    def _start(self, limits: Limits, files: list[socket.socket], body: Callable[[], None]) -> _Child:
        read_end, write_end = os.pipe()
        own_pid = os.getpid()
        pid = self._guards.fork()
        if pid:
            os.close(write_end)
            return _Child(pid, read_end)
        # Whatever happens, the child must not come back into the supervisor's loop.
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _keep_files({file.fileno() for file in files} | {write_end})
                self._guards.confine(limits, own_pid)
            except BaseException as error:
                os.write(write_end, f"{type(error).__name__}: {error}".encode()[:500])
                os._exit(1)
            os.write(write_end, b"ok")
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)

    def _confined(self, child: _Child, deadline: float) -> str:
        """Wait until a process is confined. Returns why it is not, or ""."""
        readable, _, _ = select.select([child.status], [], [], max(deadline - time.monotonic(), 0))
        if not readable:
            return "a process was not ready before the deadline"
        text = os.read(child.status, 1000).decode(errors="replace")
        return "" if text.startswith("ok") else f"a process could not be confined: {text or 'it died'}"

    def _wait(self, children: list[_Child], limits: Limits, started_at: float) -> str:
        """Until the referee (the last child) ends. Returns the limit that ended it sooner, or ""."""
        referee_status, pids = children[-1].status, [child.pid for child in children]
        watched: list[int | socket.socket] = [referee_status, self._control]
        patience_s = _FIRST_WATCH_S
        while True:
            readable, _, _ = select.select(watched, [], [], patience_s)
            if readable:  # the client sends nothing before it has the reply: either the referee or the client has ended
                return "disk limit" if self._guards.disk_bytes() > limits.disk_bytes else ""
            patience_s = _WATCH_S
            elapsed_s = time.monotonic() - started_at
            if elapsed_s > min(limits.time_s, limits.wall_s):
                own_s = self._guards.own_s(pids, elapsed_s)
                if own_s > limits.time_s:
                    return "time limit"
                if elapsed_s > limits.wall_s:
                    return "time limit" if own_s > _FAIR_SHARE * limits.time_s else _TOO_BUSY
            num_bytes, num_processes = self._guards.usage(pids)
            if num_bytes > limits.memory_bytes + self._guards.base_bytes:
                return "memory limit"
            if num_processes > limits.num_processes + len(children):
                return "process limit"
            if self._guards.disk_bytes() > limits.disk_bytes:
                return "disk limit"


def _keep_files(kept: set[int]) -> None:
    """Close all files but these; 0, 1 and 2 become /dev/null, so that output costs nothing, however much it is."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    low = 3
    for number in sorted(kept):
        os.closerange(low, number)
        low = number + 1
    os.closerange(low, 1 << 16)


def _leave(_signal_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(start: dict[str, Any]) -> None:
    """Entry point: ``control_fd``, ``level``, ``parent_pid`` and ``preload`` (modules) from the client."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client's to handle
    control = socket.socket(fileno=start["control_fd"])
    control.set_inheritable(False)
    for name in (*_PRELOADED, *start["preload"]):
        __import__(name)
    installation = (sys.prefix, sys.base_prefix)
    sys.path[:] = [path for path in sys.path if path.startswith(installation)]
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # the client's own is not for its supervisor
    guards: Guards | None = None
    try:
        guards = Guards(start["level"])
        failure = ""
    except OSError as error:
        failure = f"{start['level']}: {error.strerror or error}"
    # After the guards: both are lost when a process changes its credentials.
    signal.signal(signal.SIGTERM, _leave)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if os.getppid() != start["parent_pid"]:
        failure = "the client is gone"
    body = json.dumps({"failure": failure}).encode()
    control.sendall(HEADER.pack(len(body)) + body)
    if guards is None:
        return
    os.umask(0o077)
    os.environ.update(HOME=guards.folder, TMPDIR=guards.folder)
    tempfile.tempdir = None
    gc.collect()
    gc.set_threshold(_GC_THRESHOLD)
    gc.freeze()  # keeps the collector of a forked process from touching, and so copying, shared pages
    try:
        if not failure:
            Supervisor(control, guards).serve()
    finally:
        guards.close()
