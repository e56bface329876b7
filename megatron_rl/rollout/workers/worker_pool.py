"""The rollout workers of a client: processes of this machine that make its calls to the servers.

A server's calls are made by one worker, over the connections that it keeps; a worker serves several servers. It starts
with its first call. One that dies, or whose event loop does not turn for ``_SILENCE_S``, is killed and started again
with the next call; callers who wait for it get ``WorkerLost``, and may send their request again under another id: the
server aborts the first one with its connection. One that dies ``_MAX_DEATHS`` times without a reply in between is given
up (``WorkerFailed``).

Where workers run on other nodes too (``remote_workers.py``), servers are shared out evenly over the nodes. Calls of another node's
servers pass through a worker here, and what is large stays there: the owner has the addresses of those arrays (``MappedFile.remote``). A
worker there that cannot be reached is given up, and its servers' calls are made here.

Who waits for whom: ``call`` for the worker, which keeps the call's time limit and shows that its event loop turns. A
worker waits for nobody but servers, and ends with the process that started it. One pool belongs to one event loop.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.data.trajectory import TokenParts
from megatron_rl.errors import UserError
from megatron_rl.rollout.requests import BatchCall, BatchReply, WorkerLost
from megatron_rl.rollout.workers.remote_calls import RemoteWorker, RemoteWorkerInfo, ReplyFiles, by_node
from megatron_rl.rollout.workers.worker_connection import SILENCE_S, WorkerConnection
from megatron_rl.rollout.workers.worker_frames import STREAM_BYTES
from megatron_rl.rollout.workers.worker_messages import DetokenizeRequest, Free, SetTokenizer
from megatron_rl.system.files.shared_file import MappedFile, new_file
from megatron_rl.system.http.json_http import NoHttpReply
from megatron_rl.system.processes.child_process import WITHOUT_GPU, describe_end, start_module, wait_or_kill

_SILENCE_S = SILENCE_S
_MAX_DEATHS = 5
_TEXTS_AT_ONCE = 32
_END_TIMEOUT_S = 10.0
"""From a kill to the end of the process."""


class WorkerFailed(UserError, RuntimeError):
    """Raised if a worker exited too often and is not restarted."""


class WorkerPool:
    """A ``BatchCaller`` in other processes."""

    def __init__(self, num_workers: int, warn: Callable[[str], None], far: Sequence[RemoteWorkerInfo] = ()) -> None:
        self._far = [RemoteWorker(worker, number) for number, worker in enumerate(far, 1)]
        files = [one.file for one in self._far]
        self._workers = [_WorkerSlot(index, warn, files) for index in range(num_workers)]
        self._warn = warn
        # One worker of each node before the second of any: a server more or less on a node, not a worker's share.
        nodes: list[Sequence[RemoteWorker | None]] = [[None] * num_workers, *by_node(self._far)]
        self._sites = [node[index] for index in range(max(map(len, nodes))) for node in nodes if index < len(node)]
        """Site of each worker: a remote node, or None for a local worker."""
        self._places: dict[str, int] = {}

    async def call(self, batch: BatchCall) -> BatchReply:
        """Same as ``BatchCaller.call``; also raises WorkerLost and WorkerFailed."""
        place = self._places.setdefault(batch.url, len(self._places))
        far = self._sites[place % len(self._sites)]
        worker = self._workers[place % len(self._workers)]
        if far is None or not far.reaches(batch.url):
            reply: BatchReply = await worker.ask(batch)
            return reply
        call = far.call(batch)
        try:
            reply = await worker.ask(call)
        except WorkerLost as error:
            far.freed.extend(call.freed)
            self._report(far.lose(error))
            raise
        except NoHttpReply as error:
            self._report(far.refused(batch.url, error))
            raise
        far.answered.add(batch.url)
        return reply

    def _report(self, warning: str) -> None:
        if warning:
            self._warn(warning)

    async def texts(self, tokenizer_json: str, sequences: Sequence[TokenParts]) -> list[str]:
        """Decode the sequences without special tokens. Raises WorkerFailed."""
        # Each worker a few at a time: none keeps the servers' answers waiting, and none gets all the long ones.
        parts = [sequences[start : start + _TEXTS_AT_ONCE] for start in range(0, len(sequences), _TEXTS_AT_ONCE)]
        found = list[list[str]]([[]] * len(parts))
        left = iter(enumerate(parts))

        async def ask(worker: _WorkerSlot) -> None:
            for index, part in left:
                found[index] = await worker.texts(tokenizer_json, part)

        await asyncio.gather(*[ask(worker) for worker in self._workers])
        return [text for part in found for text in part]

    async def close(self) -> None:
        """Ends the calls in progress (the servers abort them) and the workers."""
        await asyncio.gather(*[worker.close() for worker in self._workers])

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.pid for worker in self._workers if worker.pid]


class _Dropped:
    """Ranges that the owner has dropped: those of one turn of the event loop go to the worker in one message."""

    line: WorkerConnection

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ranges: deque[tuple[int, int]] = deque()
        self._is_scheduled = False

    def add(self, first: int, num_bytes: int) -> None:
        """Safe on any thread."""
        self._ranges.append((first, num_bytes))
        if not self._is_scheduled:
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed: so is the worker
                self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        self._is_scheduled = False  # before the ranges are taken: a later one schedules the next message
        self.line.send(Free([self._ranges.popleft() for _ in range(len(self._ranges))]))


class _WorkerSlot:
    """One worker after the other, under the same number."""

    def __init__(self, index: int, warn: Callable[[str], None], far: Sequence[MappedFile]) -> None:
        self._index = index
        self._far = far
        self._warn = warn
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self._num_deaths = 0
        """Since the last reply."""
        self._last_death = ""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def ask(self, question: Any, tokenizer_json: str = "") -> Any:
        process = await self._running()
        if tokenizer_json:
            process.learn(tokenizer_json)
        answer = await process.ask(question)
        self._num_deaths = 0
        return answer

    async def texts(self, tokenizer_json: str, sequences: Sequence[TokenParts]) -> list[str]:
        while True:
            with contextlib.suppress(WorkerLost):
                return await self.ask(DetokenizeRequest(sequences), tokenizer_json)

    async def _running(self) -> "_Process":
        async with self._starting:
            if self._process is None:
                if self._num_deaths >= _MAX_DEATHS:
                    raise WorkerFailed(
                        f"rollout worker {self._index} {self._last_death}, {self._num_deaths} times without a reply in "
                        "between, and is not started again. Look for its traceback above and for the kernel's "
                        "out-of-memory messages (dmesg); rollout.num_workers=0 makes the calls in the driver instead"
                    )
                self._process = await _Process.start(self._ended, self._far)
            return self._process

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    def _ended(self, process: "_Process", how: str) -> None:
        """Unless it was closed."""
        if self._process is not process:
            return
        self._process = None
        self._num_deaths += 1
        self._last_death = f"(process {process.pid}) {how}"
        self._warn(
            f"rollout worker {self._index} {self._last_death}; it is started again, and its {process.num_waiting} "
            "requests in progress are sent again"
        )


def start_worker(mode: str, connection_fd: int, file_fd: int, secret: bytes = b"") -> subprocess.Popen[bytes]:
    """Start a rollout worker; ``mode`` as in ``worker_process.py``."""
    module, fds = "megatron_rl.rollout.workers.worker_process", (connection_fd, file_fd)
    return start_module(module, mode, *fds, message=secret, pass_fds=fds, environment=WITHOUT_GPU)


class _Process:
    """From its start to its end."""

    _tasks: list[asyncio.Task[None]]
    """Since ``start``."""

    def __init__(self, process: subprocess.Popen[bytes], line: WorkerConnection, on_end: "Callable[[_Process, str], None]") -> None:
        self.pid = process.pid
        self._process = process
        self._line = line
        self._on_end = on_end
        self._killed_for = ""
        self._tokenizer_json = ""

    @classmethod
    async def start(cls, on_end: "Callable[[_Process, str], None]", far: Sequence[MappedFile]) -> "_Process":
        ours, theirs = socket.socketpair()
        file_fd = new_file("megatron_rl_rollout")
        with theirs:
            process = start_worker("serve", theirs.fileno(), file_fd)
        reader, writer = await asyncio.open_connection(sock=ours, limit=STREAM_BYTES)
        dropped = _Dropped()
        line = WorkerConnection(reader, writer, ReplyFiles(MappedFile(file_fd, dropped.add), far))
        dropped.line = line
        os.close(file_fd)
        self = cls(process, line, on_end)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return self

    @property
    def num_waiting(self) -> int:
        return self._line.num_waiting

    async def ask(self, question: Any) -> Any:
        if self._line.over:
            await asyncio.wait(self._tasks[:1])  # its successor can start then
            raise WorkerLost(f"rollout worker (process {self.pid}) is gone")
        return await self._line.ask(question)

    def learn(self, tokenizer_json: str) -> None:
        """For texts, once."""
        if self._tokenizer_json is not tokenizer_json:
            self._tokenizer_json = tokenizer_json
            self._line.send(SetTokenizer(tokenizer_json))

    async def close(self) -> None:
        self._line.over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._line.close()
        await self._end()

    async def _read(self) -> None:
        failure = await self._line.read()
        status = await self._end()
        how = failure or self._killed_for or ("does not end" if status is None else describe_end(status))
        self._on_end(self, how)
        self._line.lose(WorkerLost(f"rollout worker (process {self.pid}) {how}"))

    async def _watch(self) -> None:
        """Kill a worker that has calls in progress and whose event loop stands still."""
        await self._line.seconds_since_reply(lambda: _SILENCE_S)
        if not self._line.over:
            self._kill(f"did nothing for {_SILENCE_S:.0f} s")

    def _kill(self, why: str) -> None:
        self._killed_for = f"was killed: it {why}"
        self._process.kill()

    async def _end(self) -> int | None:
        """Wait for the exit status; a worker exits when its connection is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A killed worker that has not ended by then is killed once more, which changes nothing.
            await asyncio.to_thread(wait_or_kill, self._process, _END_TIMEOUT_S / 2, _END_TIMEOUT_S)
        return self._process.returncode
