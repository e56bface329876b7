"""The rollout workers of a client: local processes that make its calls to the servers.

All calls to one server are made by one worker, over persistent connections; a worker calls several servers. A
worker is started by its first call. A worker that exits, or whose event loop is blocked for ``_SILENCE_S``, is
killed and restarted by the next call; callers that wait for it get ``WorkerLost`` and may resend their request
under another id, because the server aborts the first request when its connection closes. After ``_MAX_CRASHES``
consecutive crashes without a reply the worker is not restarted (``WorkerFailed``).

If workers also run on other nodes (``remote_workers.py``), the servers are divided evenly among the nodes. Calls
for a remote worker pass through a local worker, and the routes stay there: the owner has the addresses of those
arrays (``MappedFile.remote``). If a remote worker cannot be reached, the calls to its servers are made here.

Which process waits for which: ``call`` waits for the worker, which keeps the call's timeout and replies to pings. A
worker waits for servers only, and exits with the process that started it. A pool belongs to one event loop.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_rl.data.trajectory import TokenParts
from megatron_rl.errors import UserError
from megatron_rl.rollout.requests import BatchCall, BatchReply, WorkerLost
from megatron_rl.rollout.workers.remote_calls import RemoteWorker, RemoteWorkerInfo, array_in, by_node
from megatron_rl.rollout.workers.worker_connection import SILENCE_S, STREAM_BYTES, Free, SetTokenizer, WorkerConnection
from megatron_rl.system.files.shared_file import MappedFile, new_file
from megatron_rl.system.http.json_http import NoHttpReply
from megatron_rl.system.processes.child_process import WITHOUT_GPU, describe_end, start_module, wait_or_kill

_SILENCE_S = SILENCE_S
_MAX_CRASHES = 5
_TEXTS_AT_ONCE = 32
_END_TIMEOUT_S = 10.0
"""Time limit for a process to exit after its connection was closed."""


class WorkerFailed(UserError, RuntimeError):
    """A worker crashed too often and is not restarted."""


class WorkerPool:
    """A ``BatchCaller`` that makes its calls in other processes."""

    def __init__(self, num_workers: int, warn: Callable[[str], None], far: Sequence[RemoteWorkerInfo] = ()) -> None:
        self._far = [RemoteWorker(worker, number) for number, worker in enumerate(far, 1)]
        files = [one.file for one in self._far]
        self._workers = [_WorkerSlot(index, warn, files) for index in range(num_workers)]
        self._warn = warn
        # One worker of each node before a second one of any node, so that the nodes' server counts differ by at most one.
        nodes: list[Sequence[RemoteWorker | None]] = [[None] * num_workers, *by_node(self._far)]
        self._sites = [node[index] for index in range(max(map(len, nodes))) for node in nodes if index < len(node)]
        """Site of each worker: a remote node, or None for a local worker."""
        self._indices: dict[str, int] = {}

    async def call(self, batch: BatchCall) -> BatchReply:
        """Same as ``BatchCaller.call``; also raises WorkerLost and WorkerFailed."""
        # Numbered by first use, which divides the servers evenly among the workers.
        index = self._indices.setdefault(batch.url, len(self._indices))
        far = self._sites[index % len(self._sites)]
        worker = self._workers[index % len(self._workers)]
        if far is None or not far.reaches(batch.url):
            reply: BatchReply = await worker.call(batch)
            return reply
        call = far.call(batch)
        try:
            reply = await worker.call(call)
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
        # Small batches: none delays the servers' replies for long, and no worker gets all long sequences.
        batches = [sequences[start : start + _TEXTS_AT_ONCE] for start in range(0, len(sequences), _TEXTS_AT_ONCE)]
        texts = list[list[str]]([[]] * len(batches))
        remaining = iter(enumerate(batches))

        async def decode(worker: _WorkerSlot) -> None:
            for index, batch in remaining:
                texts[index] = await worker.texts(tokenizer_json, batch)

        await asyncio.gather(*[decode(worker) for worker in self._workers])
        return [text for batch in texts for text in batch]

    async def close(self) -> None:
        """End the calls in progress (the servers abort them) and the workers."""
        await asyncio.gather(*[worker.close() for worker in self._workers])

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.pid for worker in self._workers if worker.pid]


class _WorkerSlot:
    """Starts, and restarts, the worker with one index."""

    def __init__(self, index: int, warn: Callable[[str], None], far: Sequence[MappedFile]) -> None:
        self._index = index
        self._far = far
        self._warn = warn
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self._num_crashes = 0
        """Number of crashes since the last reply."""
        self._last_crash = ""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def call(self, call: Any, tokenizer_json: str = "") -> Any:
        process = await self._running()
        if tokenizer_json:
            process.set_tokenizer(tokenizer_json)
        result = await process.call(call)
        self._num_crashes = 0
        return result

    async def texts(self, tokenizer_json: str, sequences: Sequence[TokenParts]) -> list[str]:
        for _ in range(_MAX_CRASHES):
            with contextlib.suppress(WorkerLost):
                return await self.call(list(sequences), tokenizer_json)
        raise WorkerFailed(f"rollout worker {self._index} {self._last_crash}; it crashed {_MAX_CRASHES} times at the same texts")

    async def _running(self) -> "_Process":
        async with self._starting:
            if self._process is None:
                if self._num_crashes >= _MAX_CRASHES:
                    raise WorkerFailed(
                        f"rollout worker {self._index} {self._last_crash}, {self._num_crashes} times without a reply in "
                        "between, and is not restarted. Check for its traceback above and for out-of-memory messages of the "
                        "kernel (dmesg); rollout.num_workers=0 makes the calls in the driver instead"
                    )
                self._process = await _Process.start(self._ended, self._far)
            return self._process

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    def _ended(self, process: "_Process", how: str) -> None:
        if self._process is not process:
            return  # it was closed
        self._process = None
        self._num_crashes += 1
        self._last_crash = f"(process {process.pid}) {how}"
        self._warn(
            f"rollout worker {self._index} {self._last_crash}; it is restarted, and its {process.num_waiting} requests in "
            "progress are resent"
        )


def start_worker(mode: str, connection_fd: int, file_fd: int, secret: bytes = b"") -> subprocess.Popen[bytes]:
    """Start a rollout worker; ``mode`` as in ``worker_process.py``."""
    module, fds = "megatron_rl.rollout.workers.worker_process", (connection_fd, file_fd)
    return start_module(module, mode, *fds, message=secret, pass_fds=fds, environment=WITHOUT_GPU)


class _Process:
    """A running worker process and the connection to it."""

    _tasks: list[asyncio.Task[None]]
    """The tasks that read replies and watch for silence; set by ``start``."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: WorkerConnection, on_end: "Callable[[_Process, str], None]"
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._connection = connection
        self._on_end = on_end
        self._killed_for = ""
        self._tokenizer_json = ""
        self._loop = asyncio.get_running_loop()
        self._freed: deque[tuple[int, int]] = deque()
        self._free_is_scheduled = False

    @classmethod
    async def start(cls, on_end: "Callable[[_Process, str], None]", far: Sequence[MappedFile]) -> "_Process":
        ours, theirs = socket.socketpair()
        file_fd = new_file("megatron_rl_rollout")
        with theirs:
            process = start_worker("serve", theirs.fileno(), file_fd)
        reader, writer = await asyncio.open_connection(sock=ours, limit=STREAM_BYTES)
        file = MappedFile(file_fd)
        # The mapping keeps its own descriptor.
        os.close(file_fd)
        connection = WorkerConnection(reader, writer, partial(array_in, [file, *far]), file.range_of)
        self = cls(process, connection, on_end)
        file.on_drop = self._free_later
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return self

    @property
    def num_waiting(self) -> int:
        return self._connection.num_waiting

    async def call(self, call: Any) -> Any:
        if self._connection.closed:
            await asyncio.wait(self._tasks[:1])  # its successor can start then
            raise WorkerLost(f"rollout worker (process {self.pid}) is gone")
        return await self._connection.call(call)

    def set_tokenizer(self, tokenizer_json: str) -> None:
        """Send the tokenizer that decodes texts, unless the worker has it."""
        # Compared by identity, because the text has megabytes.
        if self._tokenizer_json is not tokenizer_json:
            self._tokenizer_json = tokenizer_json
            self._connection.send(SetTokenizer(tokenizer_json))

    async def close(self) -> None:
        self._connection.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._connection.close()
        await self._end()

    def _free_later(self, first: int, num_bytes: int) -> None:
        """Report a freed range, together with all ranges freed in this turn of the event loop. Callable from any thread."""
        self._freed.append((first, num_bytes))
        if not self._free_is_scheduled:
            self._free_is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and the worker with it
                self._loop.call_soon_threadsafe(self._send_freed)

    def _send_freed(self) -> None:
        self._free_is_scheduled = False  # before the ranges are taken, so that a later range schedules the next message
        self._connection.send(Free([self._freed.popleft() for _ in range(len(self._freed))]))

    async def _read(self) -> None:
        failure = await self._connection.read()
        status = await self._end()
        how = failure or self._killed_for or ("does not exit" if status is None else describe_end(status))
        self._on_end(self, how)
        self._connection.lose(WorkerLost(f"rollout worker (process {self.pid}) {how}"))

    async def _watch(self) -> None:
        """Kill the worker if its event loop is blocked."""
        await self._connection.wait_until_silent(lambda: _SILENCE_S)
        if not self._connection.closed:
            self._killed_for = f"was killed: it did nothing for {_SILENCE_S:.0f} s"
            self._process.kill()

    async def _end(self) -> int | None:
        """Return the exit status, or None; a worker exits when its connection is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(wait_or_kill, self._process, _END_TIMEOUT_S / 2, _END_TIMEOUT_S)
        return self._process.returncode
