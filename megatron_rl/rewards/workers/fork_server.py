"""The runner's end of the fork server: start it, have it fork and kill workers, stop it.

Every method runs in the runner's event loop and waits for the fork server at most ``_REPLY_TIMEOUT_S``
(``start_timeout_s`` while it imports the reward). A fork server that does not answer in time is lost: ForkServerLost.
"""

import asyncio
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards.registry import RewardError
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.frames import HEADER, SLOT_BYTES, SharedProgress, unpack

_REPLY_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
_MAX_FRAME_BYTES = 1 << 26
"""More than any chunk of results: detail and error are cut in the worker."""


class ForkServerLost(RuntimeError):
    """The fork server died or does not answer; its workers are gone with it."""


@dataclass
class RewardWorker:
    pid: int
    fork_server_pid: int
    slot: SharedProgress
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read_frame(self) -> dict[str, Any] | None:
        """The next message; None once the worker is dead or talks nonsense."""
        try:
            (length,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            if length > _MAX_FRAME_BYTES:
                return None
            return unpack(await self.reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return None


class ForkServerClient:
    """Args:
    path: Import path of the reward.
    """

    _process: subprocess.Popen[bytes]
    """Since ``start``, and another one after each further start."""
    _control: socket.socket

    def __init__(self, path: str, options: dict[str, Any], settings: RunnerSettings) -> None:
        self._path = path
        self._options = options
        self._settings = settings
        self._memory_fd = os.memfd_create("megatron_rl_rewards")
        os.ftruncate(self._memory_fd, SLOT_BYTES * settings.num_workers)
        self._memory = mmap.mmap(self._memory_fd, 0)
        self._asking = asyncio.Lock()

    async def start(self) -> None:
        """Start the process and wait until the reward is imported.

        Raises:
            RewardError: the import failed, or took longer than ``start_timeout_s``.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        settings = self._settings
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.rewards.workers.worker"],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(), self._memory_fd),
            start_new_session=True,  # a Ctrl-C in the terminal is the trainer's to handle
            env=environment,
        )
        start = {
            "parent_pid": os.getpid(),
            "control_fd": theirs.fileno(),
            "memory_fd": self._memory_fd,
            "sys_path": sys.path,
            "path": self._path,
            "options": self._options,
            "timeout_s": settings.timeout_s,
            "memory_limit_mb": settings.memory_limit_mb,
        }
        theirs.close()  # only the child may hold its end, or its death would not be seen here
        try:
            stdin = self._process.stdin
            assert stdin is not None, "stdin=PIPE makes one"
            with stdin:
                stdin.write(json.dumps(start).encode())
            reply = await self._reply(settings.start_timeout_s)
        except (ForkServerLost, BrokenPipeError) as error:
            self.stop(patience_s=0)
            raise RewardError(
                f"reward {self._path}: its process did not start within {settings.start_timeout_s:g} s "
                f"({error}); does the module import in a plain python process?"
            ) from error
        if "error" in reply:
            self.stop()
            raise RewardError(f"reward {self._path} does not load in its worker process: {reply['error']}")

    async def fork(self, slot_index: int) -> RewardWorker:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                reply = await self._ask({"do": "fork", "slot": slot_index}, theirs.fileno())
        except ForkServerLost:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        return RewardWorker(reply["pid"], self._process.pid, SharedProgress(self._memory, slot_index), reader, writer)

    async def kill(self, worker: RewardWorker) -> int:
        """Kill a worker, if it still lives, and all that it started. Returns its wait status."""
        worker.writer.transport.abort()
        if worker.fork_server_pid != self._process.pid:
            raise ForkServerLost("the fork server of the reward was restarted")  # and its workers died with it
        return (await self._ask({"do": "kill", "pid": worker.pid}))["status"]

    async def _ask(self, request: dict[str, Any], *files: int) -> dict[str, Any]:
        async with self._asking:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], files)
            except OSError as error:
                raise ForkServerLost(f"the fork server of the reward is gone: {error}") from error
            return await self._reply(_REPLY_TIMEOUT_S)

    async def _reply(self, timeout_s: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the answer.
            async with asyncio.timeout(timeout_s):
                body = await loop.sock_recv(self._control, 1 << 16)
        except TimeoutError as error:
            raise ForkServerLost(f"the fork server of the reward has not answered for {timeout_s:g} s") from error
        except OSError as error:
            raise ForkServerLost(f"the fork server of the reward is gone: {error}") from error
        if not body:
            raise ForkServerLost("the fork server of the reward is gone")
        return json.loads(body)

    def stop(self, patience_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the fork server, which kills its workers first; kill it if that takes longer than ``patience_s``."""
        self._control.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(CLOSE_TIMEOUT_S)

    def release(self) -> None:
        """Give the shared memory back; no worker may be used after this."""
        self._memory.close()
        os.close(self._memory_fd)
