"""The scoring processes: a fork server that imports the reward once, and its forked workers.

The fork server (``python -m megatron_rl.rewards.workers.worker``) never runs a reward. It handles one request at a
time: ``fork`` a worker, or ``kill`` one and report its wait status. Because it forks after the import, a replacement worker
starts in milliseconds. The fork server and each worker adopt their orphaned descendants, so a process that a reward
started can be found and killed even if it left the worker's process group.

Lifetimes: a worker dies with the fork server (parent-death signal). The fork server ends, after killing
everything below it, when its control socket closes or the runner's thread dies. Only the wait for the next
request has no time limit, and it ends with the runner.
"""

import ctypes
import gc
import json
import math
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from megatron_rl.system.processes import process_probe
from megatron_rl.system.processes.child_process import pack_frame, read_frame
from megatron_rl.system.processes.signals import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_FLUSH_S = 0.02
"""Maximum time that a worker buffers results, plus the time of its current item."""
_MAX_TEXT = 500
"""Maximum number of characters of a detail or an error."""
_MAX_METRICS = 32
_MAX_SWEEPS = 100
"""Maximum rounds of killing orphans, so that a fork bomb cannot occupy the fork server forever."""

PROGRESS_BYTES = 64
"""A cache line, so that workers do not slow each other down."""
IDLE = -1
"""Position of a worker that scores no item."""

_PROGRESS = struct.Struct("qd")
_LIMIT = struct.Struct("q")

_libc = ctypes.CDLL(None, use_errno=True)


def _adopt_orphans() -> None:
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _child_pids() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # without CONFIG_PROC_CHILDREN only the process group is killed
        return []


def describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text[:_MAX_TEXT]


# -------------------------------------------------------------------------------------------------------- the fork server


class _ForkServer:
    """Forks and kills workers on request."""

    def __init__(self, control: socket.socket, memory: mmap.mmap, scorer: "_Scorer") -> None:
        self._control = control
        self._memory = memory
        self._scorer = scorer
        self._workers: set[int] = set()

    def serve(self) -> None:
        """Answer requests until the runner closes the control socket."""
        while True:
            body, files, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
            if not body:
                return
            self._control.send(json.dumps(self._answer(json.loads(body), files)).encode())

    def _answer(self, request: dict[str, Any], files: list[int]) -> dict[str, int]:
        if request["do"] == "fork":
            return {"pid": self._fork(request["slot"], files[0])}
        return {"status": self._kill(request["pid"])}

    def _fork(self, slot: int, file: int) -> int:
        fork_server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            # Even after an error the child must not return to the fork server's loop.
            try:
                self._control.close()
                # The fork server's handler would raise inside a reward.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                # Its own group, so that a kill also reaches the processes that a reward starts.
                os.setpgid(0, 0)
                die_with_parent(fork_server_pid, signal.SIGKILL)
                _adopt_orphans()
                self._scorer.run(socket.socket(fileno=file), SharedProgress(self._memory, slot))
            finally:
                os._exit(1)
        os.close(file)
        self._workers.add(pid)
        return pid

    def _kill(self, pid: int) -> int:
        """Kill a worker with its process group and its descendants. Returns its wait status."""
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it exited before it had its own group
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._workers.discard(pid)
        for _ in range(_MAX_SWEEPS):
            orphans = [child for child in _child_pids() if child not in self._workers]
            if not orphans:
                break
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
        return status

    def close(self) -> None:
        for pid in list(self._workers):
            self._kill(pid)


# ----------------------------------------------------------------------------------------------------------- a worker


class SharedProgress:
    """Shared memory in which a worker records the item that it scores and its start time.

    The runner reads it without a request, so that a worker that hangs or crashes still names the item that it was scoring, and
    no system call is needed. Each field has one writer: the worker writes the position and the time while it owns a chunk,
    the runner writes the limit, and resets all fields between chunks.
    """

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self._memory = memory
        self._offset = index * PROGRESS_BYTES

    def reset(self, num_items: int) -> None:
        """Called by the runner before it sends a chunk of ``num_items``."""
        self.set_position(IDLE)
        self.set_limit(num_items)

    def set_position(self, position: int) -> None:
        """Called by the worker when it starts item ``position``, or becomes idle."""
        _PROGRESS.pack_into(self._memory, self._offset, position, time.monotonic())

    def read(self) -> tuple[int, float]:
        """(position, its start in monotonic seconds); the clock is the same in all processes of a node."""
        return _PROGRESS.unpack_from(self._memory, self._offset)

    def set_limit(self, limit: int) -> None:
        """Called by the runner: the worker then starts no item at or after ``limit``."""
        _LIMIT.pack_into(self._memory, self._offset + _PROGRESS.size, limit)

    def limit(self) -> int:
        return _LIMIT.unpack_from(self._memory, self._offset + _PROGRESS.size)[0]


class _Scorer:
    """Runs the reward on chunks of items, one at a time."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        *,
        timeout_s: float,
        memory_bytes: int,
        owns_processes: bool,
    ) -> None:
        self._function = function
        self._owns_processes = owns_processes
        self._arguments = arguments
        self._cpu_s = math.ceil(2 * timeout_s) + 1
        self._memory_bytes = memory_bytes

    def run(self, connection: socket.socket, progress: SharedProgress) -> None:
        """Serve chunks until the runner closes the connection."""
        self._limit_resources()
        self._pid = os.getpid()
        stream = connection.makefile("rb")
        while (items := read_frame(stream)) is not None:
            self._score_chunk(items, connection, progress)

    def _limit_resources(self) -> None:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limit = used + self._memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._memory_bytes, self._memory_bytes))
        self._cpu_hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def _score_chunk(self, items: list[Any], connection: socket.socket, progress: SharedProgress) -> None:
        """Send ``[position, value, detail, error, metrics]`` for each item, a few at a time; the last frame has ``done``.

        The chunk ends early at the limit, or when the worker should be replaced (``retire``).
        """
        results: list[tuple[int, float | None, str, str, dict[str, float]]] = []
        retire = False
        flushed_at = time.monotonic()
        for position, (response, answer, fields) in enumerate(items):
            if position >= progress.limit():
                break
            progress.set_position(position)
            result, retire = self._score_one(response, answer, fields)
            results.append((position, *result))
            if retire:
                break
            if time.monotonic() - flushed_at > _FLUSH_S:
                connection.sendall(pack_frame({"results": results, "done": False, "retire": False}))
                results, flushed_at = [], time.monotonic()
        progress.set_position(IDLE)
        connection.sendall(pack_frame({"results": results, "done": True, "retire": retire}))

    def _score_one(self, response: str, answer: str, fields: dict[str, Any]) -> "tuple[Result, bool]":
        """(result, True if the worker must be replaced)."""
        # The runner's deadline comes first; this one holds if the runner itself is stopped.
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + self._cpu_s, self._cpu_hard_limit))
        retire = False
        process_probe.set_status("scores", f"a response of {len(response)} characters")
        try:
            result = as_result(self._function(response, answer, **self._arguments, **fields))
        except MemoryError:
            limit = self._memory_bytes >> 20
            result = failed(f"MemoryError: needs more than the worker's {limit} MB")
            retire = True  # its memory may never be returned
        except BaseException as raised:  # also SystemExit and KeyboardInterrupt: a reward must not end the worker
            result = failed(describe(raised))
        process_probe.set_status("scores")
        if os.getpid() != self._pid:
            os._exit(1)  # a process forked by the reward returned here; only the worker may reply
        if not self._owns_processes and _left_processes():
            return failed("left processes running"), True
        return result, retire


Result = tuple[float | None, str, str, dict[str, float]]
"""(value, detail, error, metrics), the fields of a Score; a worker does not import the trainer's data types."""


def failed(error: str) -> Result:
    return None, "", error, {}


def as_result(outcome: Any) -> Result:
    """Convert a reward's return value, a finite number or a Score, to plain and bounded data."""
    metrics: dict[str, float] = {}
    value: float | None
    if isinstance(outcome, (int, float)):
        value, detail, error = float(outcome), "", ""
    elif hasattr(outcome, "value") and hasattr(outcome, "detail") and hasattr(outcome, "error"):
        value = None if outcome.value is None else _number(outcome.value)
        detail, error = str(outcome.detail)[:_MAX_TEXT], str(outcome.error)[:_MAX_TEXT]
        if hasattr(outcome, "metrics"):
            pairs = [(str(name)[:_MAX_TEXT], float(number)) for name, number in outcome.metrics.items()]
            metrics = {name: number for name, number in pairs[:_MAX_METRICS] if math.isfinite(number)}
    else:
        value, detail, error = _number(outcome), "", ""  # a numpy scalar, or a TypeError with the type received
    if value is not None and not math.isfinite(value):
        return None, detail, f"the reward returned {value}; expected a finite number", metrics
    if value is None and not error:
        error = "the reward returned no value and no error"
    return value, detail, error, metrics


def _number(value: Any) -> float:
    """``value`` as a float. Text is refused, because a reward that returns "1.0" did not convert its input."""
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"the reward returned the text {value[:40]!r}; expected a number or a Score")
    return float(value)


def _left_processes() -> bool:
    """True if the reward left a running process; finished processes are reaped."""
    try:
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
    except ChildProcessError:
        return False


# -------------------------------------------------------------------------------------------------------------- start


def _silence() -> None:
    """Redirect standard streams to /dev/null: a reward that prints gigabytes must not fill a log."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


class _Terminated(SystemExit):
    """SIGTERM, unlike an exit that the reward's module asks for."""


def _leave(_signal_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the end
    raise _Terminated


def main() -> None:
    """Entry point of the fork server: dies of SIGTERM, after its workers, if that is how it ends."""
    try:
        _main()
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _main() -> None:
    start = json.load(sys.stdin)
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)  # not SIGKILL, because the server must kill its workers' descendants first
    _adopt_orphans()
    _silence()
    control = socket.socket(fileno=start["control_fd"])
    memory = mmap.mmap(start["memory_fd"], 0)
    sys.path[:] = start["sys_path"]
    try:
        from megatron_rl.rewards.registry import resolve

        reward = resolve(start["path"])
        if reward.prepare is not None:
            reward.prepare(start["options"])
    except _Terminated:
        raise
    except BaseException as error:  # the runner reports any failure to import
        control.send(json.dumps({"error": describe(error)}).encode())
        return
    process_probe.enable_probe(f"grader {start['path']}")
    scorer = _Scorer(
        reward.function,
        reward.arguments(start["options"]),
        timeout_s=start["timeout_s"],
        memory_bytes=start["memory_limit_mb"] << 20,
        owns_processes=reward.owns_processes,
    )
    gc.freeze()  # keeps the collector from touching, and so copying, pages that the workers share
    fork_server = _ForkServer(control, memory, scorer)
    try:
        control.send(json.dumps({"ready": os.getpid()}).encode())
        fork_server.serve()
    except ConnectionError:
        pass  # the runner is gone
    finally:
        fork_server.close()


if __name__ == "__main__":
    main()
