"""Runs untrusted Python with its tests, in processes that cannot harm, outlive or deceive their caller.

A sandbox keeps one supervisor process (supervisor.py), which forks two confined processes per program: one runs the
program (program_process.py), one its tests (trusted_process.py).

Invariants:

- A program passed only if the test process reports that all tests passed. Program and tests share no interpreter.
- ``run`` ends within ``wall_s`` plus the start of the supervisor, and leaves no process and no file of the program.
- The result of a program is a CaseResult. InvalidTests: the tests cannot run, regardless of the program. SandboxError:
  the sandbox failed. A program can cause neither.
- Without guards against the network, other processes and other files nothing runs, unless ``allow_unsandboxed`` is set.

Thread-safe; runs are serialized.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, Self

from megatron_rl.graders.analysis.source import InvalidTests, defined_in
from megatron_rl.graders.sandbox.channel import pack_frame, read_frame
from megatron_rl.graders.sandbox.guards import ProgramLimits, visible_paths

_START_TIMEOUT_S = 30.0
_GRACE_S = 5.0
"""Time after the deadline in which the supervisor must kill and reply; then it counts as lost."""
_MAX_VERDICT_BYTES = 1 << 22
_RECORDING = 3
"""How many times a run may last that records the sides of comparisons."""
_PACKAGE = str(Path(__file__).resolve().parents[2])
LEVELS = ("namespaces", "filter")
_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['sys_path']; "
    "from megatron_rl.graders.sandbox.supervisor import main; main(start)"
)

_Level = Literal["namespaces", "filter", "none"]


class SandboxError(RuntimeError):
    """The sandbox could not run a program; the error implies nothing about the program."""


@dataclass(frozen=True)
class Program:
    code: str
    tests: str
    prompt_code: str = ""
    """Text that the code continues, or that its imports and helpers come from."""
    entry_point: str = ""
    setup: str = ""
    """Code that runs before the program, and before the tests."""


@dataclass(frozen=True)
class CaseResult:
    num_passed: int
    """Asserts that passed, if they are counted one by one."""
    num_failed: int
    detail: str

    @property
    def passed(self) -> bool:
        return self.num_failed == 0

    @property
    def share(self) -> float:
        return self.num_passed / (self.num_passed + self.num_failed)


class Sandbox:
    """Runs programs with their tests in one supervisor's processes.

    Args:
        level: Kind of confinement; None takes the first of ``LEVELS`` that this machine supports.
        allow_unsandboxed: Run with resource limits only, if the machine supports no level.
        preload: Modules that programs often import, loaded once.
    """

    def __init__(self, *, level: _Level | None = None, allow_unsandboxed: bool = False, preload: Sequence[str] = ()) -> None:
        self._levels = [level] if level else [*LEVELS, *(["none"] if allow_unsandboxed else [])]
        self._preload = list(preload)
        self._lock = threading.Lock()
        self._supervisor: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.level = ""
        """Level in use, once started."""

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor; None if none was started."""
        return self._supervisor[0].pid if self._supervisor else None

    def start(self) -> None:
        """Start the supervisor. ``run`` also starts it, and restarts a lost one.

        Raises:
            SandboxError: no level works on this machine; the message lists the refusals.
        """
        failures = []
        for level in self._levels:
            self.close()
            with tempfile.TemporaryFile() as errors:
                self._supervisor = _, control = self._launch(level, errors)
                try:
                    failure = _reply(control, time.monotonic() + _START_TIMEOUT_S)["failure"]
                except _Lost as error:
                    errors.seek(0)
                    output = errors.read().decode(errors="replace").strip()
                    failure = f"{level}: the supervisor {error}: {output[-300:]}"
            if not failure:
                self.level = level
                return
            failures.append(failure)
        self.close()
        raise SandboxError(
            f"programs cannot be confined on this machine ({'; '.join(failures)}); expected libseccomp, and namespaces or "
            "a kernel with Landlock; or set allow_unsandboxed=true to run them unconfined"
        )

    def _launch(self, level: str, errors: IO[bytes]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        start = {"control_fd": theirs.fileno(), "level": level, "preload": self._preload, "sys_path": sys.path}
        shown = [*visible_paths(), _PACKAGE] if level == "namespaces" else []
        bubblewrap = _bubblewrap(shown) if shown and shutil.which("bwrap") else []
        start["enter"] = [] if bubblewrap else shown
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        with theirs:
            process = subprocess.Popen(
                [*bubblewrap, sys.executable, "-s", "-c", _BOOT, json.dumps(start)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                # Pass nothing of the trainer's environment, which may contain credentials.
                env={
                    **kept,
                    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
                    "MALLOC_ARENA_MAX": "1",  # each further arena takes 64 MiB of the address space
                    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
                    "LANG": "C.UTF-8",
                    "PYTHONHASHSEED": "0",
                },
            )
        return process, ours

    def run(self, program: Program, limits: ProgramLimits, *, partial: bool = False) -> CaseResult:
        """Run a program with its tests.

        Args:
            partial: Count failing asserts instead of stopping at the first failure.

        Raises:
            InvalidTests: tests that do not compile, cannot run or test nothing.
            SandboxError: no verdict, for a reason that the program did not cause.
        """
        shared = {"prompt_code": program.prompt_code, "entry_point": program.entry_point, "setup": program.setup}
        defined = sorted(defined_in(program.code))
        about = {"defined": defined, "draws": "random" in program.code, "partial": partial}
        task = {**shared, **about, "tests": program.tests}
        # The request holds no test, because the program process is forked from the supervisor that reads it.
        request = {"program": {**shared, "code": program.code}, "limits": asdict(limits)}
        result, record = self._run_once(request, task)
        limits = replace(limits, time_s=_RECORDING * limits.time_s, wall_s=_RECORDING * limits.wall_s)
        while record is not None:  # the program has changed what the tests have
            again, record = self._run_once({**request, "limits": asdict(limits)}, {**task, "record": record})
            if not again.passed:
                raise InvalidTests(f"the tests hold only if the program may change what it has given: {again.detail}")
        return result

    def _run_once(self, request: dict[str, Any], task: dict[str, Any]) -> tuple[CaseResult, dict[str, Any] | None]:
        """(result, record with which the tests have to run again)."""
        wall_s, messages = request["limits"]["wall_s"], (json.dumps(request).encode(), json.dumps(task).encode())
        with self._lock:
            for is_last_try in (False, True):  # a killed supervisor is replaced once
                if self._supervisor is None or self._supervisor[0].poll() is not None:
                    self.start()
                try:
                    return _outcome(*self._converse(*messages, time.monotonic() + wall_s + _GRACE_S))
                except (_Lost, OSError) as error:
                    self.close()
                    if is_last_try:
                        raise SandboxError(f"the sandbox's supervisor {error}") from error
        raise AssertionError("the last try returns or raises")

    def _converse(self, request: bytes, task: bytes, deadline: float) -> tuple[dict[str, Any], bytes]:
        """(supervisor's reply, verdict of the test process)."""
        assert self._supervisor is not None
        _, control = self._supervisor
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                control.sendall(pack_frame(request))
                socket.send_fds(control, [b"f"], [theirs.fileno()])
            ours.settimeout(max(deadline - time.monotonic(), 0.001))
            with contextlib.suppress(OSError):  # the test process has exited; the reply has the reason
                ours.sendall(task)
                ours.shutdown(socket.SHUT_WR)
            reply = _reply(control, deadline)
            text = b""
            with contextlib.suppress(OSError):  # the reply says how the test process ended
                while len(text) <= _MAX_VERDICT_BYTES and (part := ours.recv(1 << 14)):
                    text += part
            return reply, text

    def close(self) -> None:
        """End the supervisor and everything that it runs. ``start`` restarts it."""
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


class _Lost(Exception):
    """The supervisor died or does not reply."""


def _bubblewrap(paths: Sequence[str]) -> list[str]:
    """The command that puts a supervisor into namespaces: no network, no other process, no file except ``paths``."""
    shown = [word for path in paths for word in ("--ro-bind", path, path)]
    options = (
        "bwrap --unshare-all --die-with-parent --cap-drop ALL --proc /proc --dev /dev --perms 1777 --tmpfs /tmp"
        " --perms 1777 --tmpfs /dev/shm --chdir /"
    ).split()
    return [*options, *shown, "--remount-ro", "/", "--"]


def _reply(control: socket.socket, deadline: float) -> dict[str, Any]:
    def read(size: int) -> bytes:
        control.settimeout(max(deadline - time.monotonic(), 0.001))
        return control.recv(size)

    try:
        body = read_frame(read)
    except TimeoutError as error:
        raise _Lost("does not answer") from error
    except OSError as error:
        raise _Lost(f"is gone: {error}") from error
    if body is None:
        raise _Lost("is gone")
    control.settimeout(None)
    return json.loads(body)


def _outcome(reply: dict[str, Any], text: bytes) -> tuple[CaseResult, dict[str, Any] | None]:
    if reply["failure"]:
        raise SandboxError(reply["failure"])
    if reply["ended_by"] == "busy":
        raise SandboxError("the machine is too busy to run a program within its time")
    events, brace, text = text.partition(b"{")
    program_end, tests_end = map(_how_it_ended, reply["statuses"])
    try:
        verdict = json.loads(brace + text)
    except ValueError:
        verdict = None
    if reply["ended_by"] or verdict is None:
        # The program runs only once the tests call it: any earlier failure is caused by the tests.
        how = reply["ended_by"] or f"the tests ended without a verdict: {tests_end}"
        if b"s" not in events:
            raise InvalidTests(f"before their first use of the program: {how}")
        if b"t" in events:
            raise InvalidTests(f"their threads use the program at the same time, which takes turns here: {how}")
        return CaseResult(0, 1, how), None
    if "bad_tests" in verdict:
        raise InvalidTests(verdict["bad_tests"])
    detail = verdict["detail"]
    if detail.startswith("the program ended"):
        detail = f"{program_end}; {detail}"
    elif detail.startswith("MemoryError"):
        detail = f"memory limit; {detail}"
    return CaseResult(verdict["num_passed"], verdict["num_failed"], detail), verdict.get("record")


def _how_it_ended(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return "time limit (CPU)"
    return f"killed by {signal.Signals(number).name}"
