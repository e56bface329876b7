"""Client of the fork server: starts the server, requests forks and kills of workers, and stops the server.

Every method runs on the runner's event loop and waits for the fork server at most ``_REPLY_TIMEOUT_S``
(``start_timeout_s`` while the server imports the reward). A later reply raises ForkServerLost. One request, or one start, is in
progress at a time, so that none reads another one's reply.
"""

import asyncio
import json
import mmap
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards.registry import RewardError
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.worker import PROGRESS_BYTES, SharedProgress
from megatron_rl.system.processes.child_process import describe_end, receive_frame, start_module, wait_or_kill

_REPLY_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
_MAX_FRAME_BYTES = 1 << 26
"""Larger than any chunk of results, because the worker truncates detail and error."""


class ForkServerLost(RuntimeError):
    """The fork server exited or does not reply; its workers were killed with it."""


@dataclass
class RewardWorker:
    pid: int
    fork_server_pid: int
    progress: SharedProgress
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read_frame(self) -> dict[str, Any] | None:
        """The next message, or None if the worker has exited or sent an invalid frame."""
        try:
            return await receive_frame(self.reader, _MAX_FRAME_BYTES)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return None


class ForkServerClient:
    """Starts the fork server of one reward and requests forks and kills of workers.

    Args:
        path: Import path of the reward.
    """

    _process: subprocess.Popen[bytes]
    """Set by every call of ``start``."""
    _control: socket.socket

    def __init__(self, path: str, options: dict[str, Any], settings: RunnerSettings) -> None:
        self._path = path
        self._options = options
        self._settings = settings
        self._memory_fd = os.memfd_create("megatron_rl_rewards")
        os.ftruncate(self._memory_fd, PROGRESS_BYTES * settings.num_workers)
        self._memory = mmap.mmap(self._memory_fd, 0)
        self._asking = asyncio.Lock()

    async def start(self) -> None:
        """Start the process and wait until the reward is imported.

        Raises:
            RewardError: the import failed, or took longer than ``start_timeout_s``.
            ForkServerLost: a signal ended the process before that.
        """
        async with self._asking:
            await self._start()

    async def _start(self) -> None:
        # Packets keep the messages apart, so that requests need no length.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        settings = self._settings
        start = {
            "control_fd": theirs.fileno(),
            "memory_fd": self._memory_fd,
            "sys_path": sys.path,
            "path": self._path,
            "options": self._options,
            "timeout_s": settings.timeout_s,
            "memory_limit_mb": settings.memory_limit_mb,
        }
        with theirs:  # close it here, or the end of the child would not be detected
            self._process = start_module(
                "megatron_rl.rewards.workers.worker",
                message=json.dumps(start).encode(),
                pass_fds=(theirs.fileno(), self._memory_fd),
            )
        try:
            reply = await self._reply(settings.start_timeout_s)
        except ForkServerLost as error:
            self.stop(timeout_s=0)
            if not isinstance(error.__cause__, TimeoutError) and self._process.returncode < 0:
                end = describe_end(self._process.returncode)
                raise ForkServerLost(f"the fork server of the reward {end} while it imported {self._path}") from error
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
        """Kill a worker and all processes that it started. Returns the worker's wait status."""
        # Not close(), which would wait for a worker that reads no more.
        worker.writer.transport.abort()
        return (await self._ask({"do": "kill", "pid": worker.pid}, of=worker.fork_server_pid))["status"]

    async def _ask(self, request: dict[str, Any], *files: int, of: int | None = None) -> dict[str, Any]:
        """Send a request and wait for its reply. ``of``: the process that it concerns; None: any."""
        async with self._asking:
            # Only here, because the server may be restarted while the lock is awaited.
            if of not in (None, self._process.pid):
                raise ForkServerLost("the fork server of the reward was restarted")  # which killed its workers
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], files)
            except OSError as error:
                raise ForkServerLost(f"the fork server of the reward is gone: {error}") from error
            return await self._reply(_REPLY_TIMEOUT_S)

    async def _reply(self, timeout_s: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with the reply.
            async with asyncio.timeout(timeout_s):
                body = await loop.sock_recv(self._control, 1 << 16)
        except TimeoutError as error:
            raise ForkServerLost(f"the fork server of the reward has not replied for {timeout_s:g} s") from error
        except OSError as error:
            raise ForkServerLost(f"the fork server of the reward is gone: {error}") from error
        if not body:
            raise ForkServerLost("the fork server of the reward is gone")
        return json.loads(body)

    def stop(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop the fork server, which kills its workers first; kill the server after ``timeout_s``."""
        self._control.close()
        wait_or_kill(self._process, timeout_s, CLOSE_TIMEOUT_S, group=True)

    def release(self) -> None:
        """Free the shared memory; workers cannot be used afterwards."""
        self._memory.close()
        os.close(self._memory_fd)
