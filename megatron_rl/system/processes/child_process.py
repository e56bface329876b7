"""Child processes of a run: starts, authenticates and kills them, frames their messages, and ties their lives to the parent's.

Reward fork servers, rollout workers, the array server and SGLang servers start here. Each child has its own session, so that a
Ctrl-C in the terminal reaches only the driver. It dies when the *thread* that started it ends, because the kernel's
parent-death signal is tied to that thread; a caller on a short-lived thread uses ``start_on_own_thread``. Secrets and settings
travel over standard input, because command lines are public.

A frame is the length of its body, then the body. Rewards send JSON, because a worker that an untrusted response has
compromised must not make its reader execute code. Two channels differ. Rollout workers (``rollout/workers/worker_connection.py``)
send pickles with a table of arrays, which stay in shared memory. The sandbox (``graders/sandbox/channel.py``) has its own code
for the same frames, because the code that confines untrusted programs imports nothing of the trainer.

The owner of a child decides when to restart it; the four owners count crashes against different events (a reply, ten minutes
of life, a run's restarts, none).
"""

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from megatron_rl.system.processes.signals import STOP_SIGNALS, die_with_parent

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SECRET_BYTES = 32
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_HEADER = struct.Struct("!I")


# -------------------------------------------------------------------------------------------------------------- the parent


def start_module(
    module: str,
    *arguments: object,
    message: bytes = b"",
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stdout: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module PARENT_PID arguments...`` with one thread for linear algebra.

    ``message`` becomes the child's whole standard input. A child that ends before it has read the message raises nothing here.
    ``environment`` is added to this process's environment.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid()), *map(str, arguments)],
        stdin=subprocess.PIPE if message else subprocess.DEVNULL,
        stdout=stdout,
        pass_fds=pass_fds,
        start_new_session=True,
        env={**os.environ, **_ONE_THREAD, **(environment or {})},
    )
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(message)
    return process


def start_on_own_thread(start: Callable[[], subprocess.Popen[bytes]], name: str) -> subprocess.Popen[bytes]:
    """Call ``start`` on a thread that lives as long as the process that it starts. Raises the OSError of ``start``."""
    started: list[subprocess.Popen[bytes] | OSError] = []
    ready = threading.Event()

    def watch() -> None:
        try:
            process = start()
        except OSError as error:
            started.append(error)
            ready.set()
            return
        started.append(process)
        ready.set()
        # Not process.wait(), which holds a lock with which poll() reports a dead process as running.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=watch, name=name, daemon=True).start()
    ready.wait()
    if isinstance(started[0], OSError):
        raise started[0]
    return started[0]


def wait_or_kill(process: subprocess.Popen[bytes], timeout_s: float, end_timeout_s: float | None = None, *, group: bool = False) -> None:
    """Wait for ``process`` to end, and kill it, or its whole process ``group``, after ``timeout_s``.

    Raises TimeoutExpired if the killed process has not ended ``end_timeout_s`` later (None: waits without a limit).
    """
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait(end_timeout_s)


def describe_end(exit_code: int) -> str:
    """Describe the end of a process; ``exit_code`` is negative for a signal, as in ``Popen.returncode``."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    hint = " (used up its CPU time)" if exit_code == -signal.SIGXCPU else ""
    return f"died of {signal.Signals(-exit_code).name}{hint}"


# --------------------------------------------------------------------------------------------------------------- the child


def begin_child(parent_pid: int) -> None:
    """End this process when its parent ends, and ignore stop signals, which the parent handles."""
    die_with_parent(parent_pid, signal.SIGKILL)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# ------------------------------------------------------------------------------------------------------- secret and frames


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def read_secret() -> bytes:
    """Read the secret that the parent sent as ``message``."""
    return sys.stdin.buffer.read(SECRET_BYTES)


def is_secret(found: bytes, secret: bytes) -> bool:
    """True if both are equal. The duration does not depend on where they differ."""
    return hmac.compare_digest(found, secret)


def pack_frame(message: Any) -> bytes:
    """Encode ``message`` as a frame. Lone surrogates and NUL bytes survive, because JSON escapes them."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any:
    """Read the next message; None at the end of the stream."""
    header = stream.read(_HEADER.size)
    return json.loads(stream.read(*_HEADER.unpack(header))) if header else None


async def receive_frame(reader: asyncio.StreamReader, max_bytes: int) -> Any:
    """Read the next message on an event loop.

    Raises IncompleteReadError or ConnectionError at the end of the stream, ValueError for a frame that is too long or not JSON.
    """
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes; expected at most {max_bytes}")
    return json.loads(await reader.readexactly(length))
