"""Supervisor process of the sandbox: forks, confines, monitors and kills the processes that run untrusted code.

Started once by its client (sandbox.py). Requests from the control socket are handled one at a time.

Invariants:

- A process runs untrusted code only after every guard is in place. A guard that fails is reported as a failure of the
  sandbox, and the code is not run.
- After each request no process and no file of it is left.
- Tests and verdicts travel over a socket between the client and the test process; no other fork has this socket.

Which process waits for which: the client waits for the reply, which comes at the deadline at the latest; the supervisor waits for the
test process, for a limit or for the client's exit, whichever comes first, and then kills all processes.
"""

import contextlib
import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from megatron_rl.graders.sandbox.channel import FrameChannel, pack_frame, read_frame
from megatron_rl.graders.sandbox.guards import (
    Guards,
    ProgramLimits,
    empty_folder,
    folder_bytes,
    limit_cpu,
    visible_paths,
)
from megatron_rl.graders.sandbox.namespaces import enter_namespaces
from megatron_rl.graders.sandbox.program_process import ProgramProcess
from megatron_rl.graders.sandbox.trusted_process import judge

_IDLE_FACTOR, _IDLE_S = 2.0, 1.0
"""A program may wait (sleep, block) for this multiple of its time limit, plus these seconds."""
_WATCH_S, _FIRST_WATCH_S = 0.02, 0.1
"""Seconds between two checks of the limits; most programs have ended before the first check."""
_IMPORTS = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)|import[ \t]+([^#;\n]+))", re.MULTILINE)
_PRELOADED = (
    "abc argparse array ast atexit base64 bisect calendar cmath collections copy csv dataclasses datetime decimal enum "
    "fractions functools hashlib heapq io itertools json logging math operator os random re statistics string struct sys "
    "textwrap threading time types typing unicodedata unittest uuid"
).split()


_Ready = Callable[[str], None]
"""Called by a confined process with the source whose imports do not count as its time."""


class _Child:
    """A forked process; it writes "c" to the pipe ``status`` once confined, and "r" when its own time starts."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self.status = pid, status
        self.end = os.pidfd_open(pid)
        self.failure = ""
        self.is_ready = False
        self.ready_times = (0.0, 0.0)
        self._status_text = ""

    def times(self) -> tuple[float, float]:
        """(CPU seconds of all its threads, seconds of waiting for a CPU)."""
        try:
            cpu_s = time.clock_gettime((~self.pid << 3) | 2)  # the process's CPU clock, see clock_getcpuclockid(3)
            with open(f"/proc/{self.pid}/schedstat") as file:
                return cpu_s, int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):
            return self.ready_times

    def read_status(self) -> None:
        text = os.read(self.status, 600).decode(errors="replace")
        self._status_text += text
        if not self._status_text.startswith("c"):
            self.failure = self._status_text or "it exited"
        if not text or text.endswith("r"):
            self.is_ready, self.ready_times = True, self.times()

    def kill(self) -> int:
        """Kill and reap the process; returns its wait status."""
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.status)
        os.close(self.end)
        return os.waitpid(self.pid, 0)[1]


class Supervisor:
    def __init__(self, control: socket.socket, guards: Guards) -> None:
        self._control = control
        self._guards = guards

    def serve(self) -> None:
        """Handle requests until the client closes the socket."""
        while (request := read_frame(self._control.recv)) is not None:
            self._control.sendall(pack_frame(json.dumps(self._run(json.loads(request))).encode()))

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one program. The reply tells which limit ended it, and how its processes ended."""
        limits, program = ProgramLimits(**request["limits"]), request["program"]
        started_at = time.monotonic()
        asks, answers = os.pipe(), os.pipe()
        of_program, of_tests = FrameChannel(asks[0], answers[1]), FrameChannel(answers[0], asks[1])
        children = [self._start(limits, of_program.files, lambda ready: _run_program(program, of_program, ready))]
        # After the fork of the program process, which must not have the socket.
        channel_fd = socket.recv_fds(self._control, 1, 1)[1][0]
        try:
            files = (channel_fd, *of_tests.files)
            children.append(self._start(limits, files, lambda ready: _run_tests(channel_fd, of_tests, ready)))
            for file in (*asks, *answers, channel_fd):
                os.close(file)
            ended_by = self._wait(children, limits, started_at)
        finally:
            statuses = [child.kill() for child in children]
            empty_folder(self._guards.folder)
        failure = next((f"a process could not be confined: {child.failure}" for child in children if child.failure), "")
        return {"failure": failure, "ended_by": ended_by, "statuses": statuses}

    def _start(self, limits: ProgramLimits, files: tuple[int, ...], body: Callable[[_Ready], None]) -> _Child:
        read_end, write_end = os.pipe()
        own_pid = os.getpid()
        pid = os.fork()
        if pid:
            os.close(write_end)
            return _Child(pid, read_end)

        def ready(text: str) -> None:
            _import_all(text)
            limit_cpu(limits.time_s)
            os.write(write_end, b"r")
            os.close(write_end)

        try:  # on any error the child must not return to the supervisor's loop
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _keep_files({*files, write_end, *self._guards.files})
                self._guards.confine(limits, own_pid)
            except BaseException as error:
                os.write(write_end, f"{type(error).__name__}: {error}".encode()[:500])
                os._exit(1)
            os.write(write_end, b"c")
            body(ready)
        finally:
            os._exit(0)

    def _wait(self, children: list[_Child], limits: ProgramLimits, started_at: float) -> str:
        """Wait until the test process (the last child) or the client ends, a child fails, or a limit is exceeded.

        Returns the exceeded limit, "busy" if the children waited for a CPU for more than half of ``wall_s``, or "".
        """
        end, patience_s, ready_at = children[-1].end, _FIRST_WATCH_S, 0.0
        while True:
            starting = [child for child in children if not child.is_ready]
            watched: list[Any] = [end, self._control, *(child.status for child in starting)]
            readable, _, _ = select.select(watched, [], [], patience_s)
            for child in starting:
                if child.status in readable:
                    child.read_status()
                    ready_at = time.monotonic()
            # The client sends nothing before it has the reply, so either the test process or the client has ended.
            if end in readable or self._control in readable or any(child.failure for child in children):
                return "disk limit" if folder_bytes(self._guards.folder) > limits.disk_mb << 20 else ""
            now, patience_s = time.monotonic(), _WATCH_S
            if now - started_at > limits.wall_s:
                # Program and tests take turns once both are ready; before, they wait for a CPU at the same time.
                waited_s = sum(child.times()[1] - child.ready_times[1] for child in children)
                waited_s += max(child.ready_times[1] for child in children)
                return "busy" if waited_s > (now - started_at) / 2 else "time limit (by the clock)"
            is_ready = all(child.is_ready for child in children)
            if is_ready and (limit := self._exceeded(children, limits, now - ready_at)):
                return limit

    def _exceeded(self, children: list[_Child], limits: ProgramLimits, elapsed_s: float) -> str:
        times = [(*child.times(), *child.ready_times) for child in children]
        cpu_s = sum(cpu - before for cpu, _, before, _ in times)
        waited_s = sum(waited - before for _, waited, _, before in times)
        if cpu_s > limits.time_s:
            return "time limit"
        if elapsed_s - cpu_s - waited_s > _IDLE_FACTOR * limits.time_s + _IDLE_S:
            return "time limit (asleep)"
        try:
            num_threads = len(os.listdir(f"/proc/{children[0].pid}/task"))
        except OSError:
            num_threads = 1
        if num_threads > limits.num_processes:
            return "process limit"
        return "disk limit" if folder_bytes(self._guards.folder) > limits.disk_mb << 20 else ""


def _run_program(program: dict[str, str], wire: FrameChannel, ready: _Ready) -> None:
    ready("\n".join(program.values()))
    ProgramProcess(program, wire).serve()


def _run_tests(channel_fd: int, wire: FrameChannel, ready: _Ready) -> None:
    """Read the task from the channel until its end; write the events of ``judge`` to the channel, then the verdict."""
    parts = []
    while part := os.read(channel_fd, 1 << 20):
        parts.append(part)
    task = json.loads(b"".join(parts))
    ready("\n".join((task["prompt_code"], task["setup"], task["tests"])))
    verdict = json.dumps(judge(task, wire, lambda text: os.write(channel_fd, text))).encode()
    while verdict:
        verdict = verdict[os.write(channel_fd, verdict) :]


def _import_all(text: str) -> None:
    """Import the installed modules that ``text`` imports, because a program's time limit excludes imports."""
    for module, modules in _IMPORTS.findall(text):
        for name in (module or modules).split(","):
            with contextlib.suppress(BaseException):  # the program meets the error again if it needs the module
                importlib.import_module(name.split()[0])


def _keep_files(kept: set[int]) -> None:
    """Close all files except ``kept``; 0, 1 and 2 become /dev/null, so that any amount of output costs nothing."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    low = 3
    for number in sorted(kept):
        os.closerange(low, number)
        low = number + 1
    os.closerange(low, 1 << 16)


def _report_start(control: socket.socket, failure: str) -> None:
    control.sendall(pack_frame(json.dumps({"failure": failure}).encode()))


def main(start: dict[str, Any]) -> None:
    """Entry point. ``start`` from the client: ``control_fd``, ``level``, ``preload`` (modules) and ``enter``: paths to see in
    namespaces that this process must enter itself, or none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles it
    control = socket.socket(fileno=start["control_fd"])
    control.set_inheritable(False)
    try:
        if start["enter"]:
            enter_namespaces(start["enter"])
    except OSError as error:
        _report_start(control, f"namespaces: {error}; bubblewrap may be allowed to (Debian, Ubuntu: apt-get install bubblewrap)")
        return
    for name in (*_PRELOADED, *start["preload"]):
        __import__(name)
    visible = tuple(f"{path}/" for path in visible_paths())
    sys.path[:] = [path for path in sys.path if f"{path}/".startswith(visible)]
    sys.set_int_max_str_digits(0)  # the CPU limit bounds the time of long integers
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # the client's CPU limit does not apply to its supervisor
    guards: Guards | None = None
    try:
        guards = Guards(start["level"])
        failure = ""
    except (OSError, RuntimeError) as error:
        failure = f"{start['level']}: {error}"
    _report_start(control, failure)
    if guards is None:
        return
    os.umask(0o077)
    os.environ.update(HOME=guards.folder, TMPDIR=guards.folder)
    tempfile.tempdir = None
    gc.collect()
    gc.set_threshold(20_000)  # most programs end before the first collection
    gc.freeze()  # keeps the collector of a forked process from touching, and so copying, shared pages
    try:
        Supervisor(control, guards).serve()
    finally:
        guards.close()
