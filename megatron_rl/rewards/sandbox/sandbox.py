"""Runs untrusted Python with its tests, in processes that cannot harm, outlive or deceive their caller.

A sandbox keeps one supervisor process (supervisor.py), which forks a confined process for each program.

Invariants:

- A program passed only if a referee in another process (or, for tests that must share its interpreter, a signed verdict)
  says that all tests held. Exiting, printing, patching and returning objects that equal everything are failures.
- ``run`` ends within ``wall_s`` plus the start of the supervisor, and leaves no process and no file of the program.
- What a program does within its limits is an Outcome; SandboxError means that the sandbox, not the program, failed.
- Without a guard against the network, other processes and other files, nothing runs, unless ``allow_unsandboxed``.

Thread safe; runs are one at a time.
"""

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from megatron_rl.rewards.sandbox.supervisor import HEADER

_START_TIMEOUT_S = 30.0
_GRACE_S = 5.0
"""Beyond the deadline, for the supervisor to kill and answer; then it is lost itself."""
_MAX_VERDICT_BYTES = 1 << 16
LEVELS = ("namespaces", "filter")
_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['sys_path']; "
    "from megatron_rl.rewards.sandbox.supervisor import main; main(start)"
)

_Level = Literal["namespaces", "filter", "none"]


class SandboxError(RuntimeError):
    """The sandbox could not run a program; says nothing about the program."""


class BadTestsError(ValueError):
    """The tests cannot be run, whatever the program."""


@dataclass(frozen=True)
class Program:
    code: str
    tests: str | Sequence[str]
    prompt_code: str = ""
    """What the code continues, or what its imports and helpers come from."""
    entry_point: str = ""
    setup: str = ""
    """Runs before the code, and before the tests."""


@dataclass(frozen=True)
class ProgramLimits:
    """What one program may use."""

    time_s: float = 3.0
    """Of code and tests together; time in which they waited for a CPU does not count."""
    memory_mb: int = 512
    """Address space of one process, and resident memory of all of them."""
    disk_mb: int = 16
    num_processes: int = 16
    wall_s: float = 4.5
    """By the clock, waiting included."""


@dataclass(frozen=True)
class Outcome:
    num_passed: int
    """Asserts that held, where they are counted one by one."""
    num_failed: int
    detail: str

    @property
    def passed(self) -> bool:
        return self.num_failed == 0

    @property
    def share(self) -> float:
        return self.num_passed / (self.num_passed + self.num_failed)


class Sandbox:
    """Args:
    level: How programs are confined; None takes the first of ``LEVELS`` that this kernel can do.
    allow_unsandboxed: Run with resource limits only where it can do none of them.
    preload: Modules that programs often import, loaded once.
    """

    def __init__(
        self, *, level: _Level | None = None, allow_unsandboxed: bool = False, preload: Sequence[str] = ()
    ) -> None:
        self._levels = [level] if level else [*LEVELS, *(["none"] if allow_unsandboxed else [])]
        self._preload = list(preload)
        self._lock = threading.Lock()
        self._supervisor: _Supervisor | None = None
        self.level = ""
        """The level in use, once started."""

    def start(self) -> None:
        """Start the supervisor. ``run`` does it too, and starts a lost one again.

        Raises:
            SandboxError: no level works here, with what the kernel refused.
        """
        self._started()

    def _started(self) -> "_Supervisor":
        failures = []
        for level in self._levels:
            self.close()
            self._supervisor = supervisor = self._launched(level)
            try:
                failure = _reply(supervisor.control, time.monotonic() + _START_TIMEOUT_S)["failure"]
            except _Lost as error:
                failure = f"{level}: the supervisor {error}"
            if not failure:
                self.level = level
                return supervisor
            failures.append(failure)
        self.close()
        raise SandboxError(
            f"programs cannot be confined on this machine ({'; '.join(failures)}); expected a kernel that allows "
            "namespaces or has Landlock, in a container as well; or set allow_unsandboxed=true to run them without"
        )

    def _launched(self, level: str) -> "_Supervisor":
        ours, theirs = socket.socketpair()
        start = {
            "control_fd": theirs.fileno(),
            "level": level,
            "parent_pid": os.getpid(),
            "preload": self._preload,
            "sys_path": sys.path,
        }
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-s", "-c", _BOOT, json.dumps(start)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                # Nothing of the trainer's environment: it may hold credentials.
                env={
                    **kept,
                    "PATH": "/usr/bin:/bin",
                    "LANG": "C.UTF-8",
                    "PYTHONHASHSEED": "0",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "MKL_NUM_THREADS": "1",
                },
            )
        return _Supervisor(process, ours)

    def run(self, program: Program, limits: ProgramLimits = ProgramLimits(), *, partial: bool = False) -> Outcome:
        """Run a program with its tests.

        Args:
            partial: Count failing asserts instead of stopping at the first one.

        Raises:
            BadTestsError: tests that do not compile or test nothing.
            SandboxError: no verdict, and not by the program's doing.
        """
        with self._lock:
            deadline = time.monotonic() + limits.wall_s
            outcome = self._run(program, limits, partial, together=False, wall_s=limits.wall_s)
            if outcome is None:
                # Both runs together have one deadline.
                rest_s = max(deadline - time.monotonic(), 0.1)
                outcome = self._run(program, limits, partial, together=True, wall_s=rest_s)
            if outcome is None:
                raise SandboxError("a program that shares the interpreter of its tests was told to run apart from them")
            return outcome

    def _run(
        self, program: Program, limits: ProgramLimits, partial: bool, *, together: bool, wall_s: float
    ) -> Outcome | None:
        """None: these tests must run in the program's interpreter."""
        code = {
            "prompt_code": program.prompt_code,
            "entry_point": program.entry_point,
            "setup": program.setup,
        }
        request = {
            "limits": {
                "time_s": limits.time_s,
                "wall_s": wall_s,
                "memory_bytes": limits.memory_mb << 20,
                "disk_bytes": limits.disk_mb << 20,
                "num_processes": limits.num_processes,
            },
            "program": {"code": program.code, **code},
            "together": together,
        }
        key = secrets.token_hex(16)
        tests = program.tests if isinstance(program.tests, str) else list(program.tests)
        task = {**code, "tests": tests, "partial": partial, "key": key}
        reply, text = self._exchange(json.dumps(request).encode(), json.dumps(task).encode(), wall_s)
        if reply["failure"]:
            raise SandboxError(reply["failure"])
        return _outcome(reply, text, key if together else "")

    def _exchange(self, request: bytes, task: bytes, wall_s: float) -> tuple[dict[str, Any], bytes]:
        """Give a request to the supervisor; a lost supervisor is replaced once."""
        for last_try in (False, True):
            supervisor = self._supervisor
            if supervisor is None or supervisor.process.poll() is not None:
                supervisor = self._started()
            ours, theirs = socket.socketpair()
            with ours:
                try:
                    with theirs:
                        supervisor.control.sendall(HEADER.pack(len(request)) + request)
                        socket.send_fds(supervisor.control, [b"f"], [theirs.fileno()])
                    return _converse(supervisor.control, ours, task, time.monotonic() + wall_s + _GRACE_S)
                except (_Lost, OSError) as error:
                    self.close()
                    if last_try:
                        raise SandboxError(f"the sandbox's supervisor {error}") from error
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """End the supervisor and all that it runs. It can be started again."""
        if self._supervisor is None:
            return
        process, control = self._supervisor
        self._supervisor = None
        control.close()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Supervisor(NamedTuple):
    process: subprocess.Popen[bytes]
    control: socket.socket


class _Lost(Exception):
    """The supervisor died or does not answer."""


def _converse(
    control: socket.socket, channel: socket.socket, task: bytes, deadline: float
) -> tuple[dict[str, Any], bytes]:
    """Write the task to the referee and read its verdict, until the supervisor replies."""
    channel.setblocking(False)
    rest: memoryview | None = memoryview(task)
    verdict, open_for_reading = b"", True
    while True:
        readable, writable, _ = select.select(
            [control, *([channel] if open_for_reading else [])],
            [channel] if rest is not None else [],
            [],
            max(deadline - time.monotonic(), 0),
        )
        if not readable and not writable:
            raise _Lost("does not answer")
        if rest is not None and writable:
            rest = _write_some(channel, rest)
        if channel in readable:
            part = _read_some(channel)
            verdict += part
            open_for_reading = bool(part) and len(verdict) <= _MAX_VERDICT_BYTES
        if control in readable:
            reply = _reply(control, deadline)
            # The reply may overtake the end of the verdict, which is in the socket by then.
            while open_for_reading and (part := _read_some(channel)) and len(verdict) <= _MAX_VERDICT_BYTES:
                verdict += part
            return reply, verdict


def _reply(control: socket.socket, deadline: float) -> dict[str, Any]:
    length = HEADER.unpack(_receive(control, HEADER.size, deadline))[0]
    return json.loads(_receive(control, length, deadline))


def _receive(control: socket.socket, size: int, deadline: float) -> bytes:
    parts = []
    while size:
        control.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            part = control.recv(size)
        except TimeoutError as error:
            raise _Lost("does not answer") from error
        except OSError as error:
            raise _Lost(f"is gone: {error}") from error
        if not part:
            raise _Lost("is gone")
        parts.append(part)
        size -= len(part)
    control.settimeout(None)
    return b"".join(parts)


def _write_some(channel: socket.socket, rest: memoryview) -> memoryview | None:
    """What is left to write; None once all is written, or nobody reads it any more."""
    try:
        rest = rest[channel.send(rest) :]
        if not rest:
            channel.shutdown(socket.SHUT_WR)
            return None
    except BlockingIOError:
        pass
    except OSError:
        return None
    return rest


def _read_some(channel: socket.socket) -> bytes:
    try:
        return channel.recv(1 << 14)
    except OSError:
        return b""


def _outcome(reply: dict[str, Any], text: bytes, key: str) -> Outcome | None:
    """What a verdict and the end of the processes say together; None for tests that must share the interpreter."""
    how = _how_it_ended(reply["statuses"][0])
    if reply["ended_by"]:
        return Outcome(0, 1, reply["ended_by"])
    try:
        verdict = json.loads(text)
    except ValueError:
        verdict = None
    if key:
        signed = isinstance(verdict, dict) and secrets.compare_digest(str(verdict.get("key")), key)
        if not signed:
            return Outcome(0, 1, f"the program ended before its tests did: {how}")
    elif verdict is None:
        raise SandboxError(f"the tests ended without a verdict: {_how_it_ended(reply['statuses'][-1])}")
    if verdict["kind"] == "bad_tests":
        raise BadTestsError(verdict["detail"])
    if verdict["kind"] == "inseparable":
        return None
    detail = verdict["detail"]
    if detail.startswith("the program ended"):
        detail = f"{how}; {detail}"
    elif detail.startswith("MemoryError"):
        detail = f"memory limit; {detail}"
    return Outcome(verdict["num_passed"], verdict["num_failed"], detail)


def _how_it_ended(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return "time limit (CPU)"
    return f"died of {signal.Signals(number).name}"
