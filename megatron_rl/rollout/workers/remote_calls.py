"""Calls made by rollout workers on other nodes, so that routes stay on the node that receives them.

The owner (``worker_pool.py``) gives a call for a remote worker to one of its local workers, which forwards the call
over one persistent connection (``Relay``). The remote worker makes the call and keeps the routes in its own shared
file; tokens and log-probs come back with the reply. The owner has the addresses of the routes, and reports freed
ranges with its next call to that worker. Which process waits for which: ``Relay.call`` waits for the remote worker,
which must reply to pings. ``remote_workers.py`` starts the remote workers.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from megatron_rl.rollout.requests import BatchCall, BatchReply, WorkerLost
from megatron_rl.rollout.workers.worker_connection import SILENCE_S, STREAM_BYTES, Free, WorkerConnection
from megatron_rl.system.files.shared_file import NODE, ArrayRange, MappedFile
from megatron_rl.system.http.json_http import NoHttpReply

_CONNECT_TIMEOUT_S = 30.0
_WARN_EVERY_S = 10.0
FILE = 1 << 48
"""Added n times to the first byte of a range in a reply if the range is in the file of remote worker n."""


class NodeLost(WorkerLost):
    """The workers of another node can no longer be reached."""


class RemoteWorkerInfo(NamedTuple):
    """A rollout worker on another node."""

    host: str
    port: int
    secret: str
    """Hexadecimal digits of the secret that starts each connection."""
    pid: int
    """The process that keeps the shared file open, and its node, as in ``Address``."""
    fd: int

    def __str__(self) -> str:
        return f"the rollout worker of node {self.pid // NODE} at {self.host}:{self.port}"


@dataclass(frozen=True)
class RemoteCall:
    """A call that a local worker forwards to a remote worker."""

    worker: RemoteWorkerInfo
    number: int
    """The worker's number; ``number * FILE`` is added to the ranges of its file in the reply."""
    batch: BatchCall
    freed: Sequence[tuple[int, int]]
    """(first byte, number of bytes) of ranges that the owner no longer references."""


class RemoteWorker:
    """The owner's view of a remote worker."""

    def __init__(self, worker: RemoteWorkerInfo, number: int) -> None:
        self.worker, self._number = worker, number
        self._lost = False
        self._warned_at = -math.inf
        self._unreachable: set[str] = set()
        self.answered: set[str] = set()
        """URLs of servers that have replied to this worker."""
        self.freed: deque[tuple[int, int]] = deque()
        """Ranges of its file that are no longer referenced here; the next call reports them."""
        freed = self.freed
        self.file = MappedFile.remote(worker.pid, worker.fd, lambda first, num_bytes: freed.append((first, num_bytes)))

    def call(self, batch: BatchCall) -> RemoteCall:
        freed = [self.freed.popleft() for _ in range(len(self.freed))]
        return RemoteCall(self.worker, self._number, batch, freed)

    def reaches(self, url: str) -> bool:
        """False if the worker is known not to reach the server. A loopback address there means another machine."""
        is_local = _is_loopback(urlsplit(url).hostname or "") and not _is_loopback(self.worker.host)
        return not (self._lost or is_local or url in self._unreachable)

    def lose(self, error: WorkerLost) -> str:
        """Record a lost call. Returns a warning, or an empty string."""
        if self._lost:
            return ""
        if isinstance(error, NodeLost):
            self._lost = True
            return f"{error}. It is not used any longer: the calls to its servers are made on the driver's machine"
        # Many calls are lost at the same time, so warn once for all of them.
        last, self._warned_at = self._warned_at, time.monotonic()
        return "" if self._warned_at - last < _WARN_EVERY_S else f"{error}; it is restarted, and its requests are resent"

    def refused(self, url: str, error: NoHttpReply) -> str:
        """Record that a server did not reply. Returns a warning, or an empty string."""
        if error.timed_out or url in self.answered | self._unreachable:
            return ""
        self._unreachable.add(url)
        return f"{self.worker} cannot reach the server at {url} ({error}): the calls to it are made on the driver's machine"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def by_node(workers: Sequence[RemoteWorker]) -> list[list[RemoteWorker]]:
    nodes = sorted({one.worker.pid // NODE for one in workers})
    return [[one for one in workers if one.worker.pid // NODE == node] for node in nodes]


def array_in(files: Sequence[MappedFile], range_: ArrayRange) -> np.ndarray:
    """Array at a range of a reply; ``files``: the local worker's file, then the files of the remote workers by number."""
    number, first = divmod(range_.first, FILE)
    return files[number].at(ArrayRange(first, range_.num_bytes))


class Relay:
    """Forwards calls to one remote worker."""

    def __init__(self, worker: RemoteWorkerInfo, number: int) -> None:
        self._worker, self._number = worker, number
        self._file = MappedFile.remote(worker.pid, worker.fd)
        self._connection: WorkerConnection | None = None
        self._connecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, call: RemoteCall) -> BatchReply:
        """Raises the errors of ``BatchCaller.call``, WorkerLost and NodeLost."""
        connection = await self._connected()
        if call.freed:
            connection.send(Free(call.freed))
        # After the freed ranges, whose memory the reply can then use.
        reply: BatchReply = await connection.call(call.batch)
        return reply

    def range_of(self, raw: memoryview) -> ArrayRange | None:
        """The range, in the owner's numbering, of an array that stayed on the other node; None for any other array."""
        range_ = self._file.range_of(raw)
        return None if range_ is None else ArrayRange(self._number * FILE + range_.first, range_.num_bytes)

    async def _connected(self) -> WorkerConnection:
        async with self._connecting:
            if self._connection is None or self._connection.closed:
                worker = self._worker
                try:
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        reader, writer = await asyncio.open_connection(worker.host, worker.port, limit=STREAM_BYTES)
                except (OSError, TimeoutError) as error:
                    raise NodeLost(
                        f"{worker} cannot be reached within {_CONNECT_TIMEOUT_S:.0f} s: {type(error).__name__}: {error}"
                    ) from error
                writer.write(bytes.fromhex(worker.secret))
                connection = WorkerConnection(reader, writer, self._file.at, self._file.range_of)
                self._connection = connection
                for work in (self._read(connection), self._watch(connection)):
                    task = asyncio.get_running_loop().create_task(work)
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            return self._connection

    async def _read(self, connection: WorkerConnection) -> None:
        failure = await connection.read()
        connection.lose(WorkerLost(f"{self._worker} {failure or 'has closed its connection'}"))

    async def _watch(self, connection: WorkerConnection) -> None:
        await connection.wait_until_silent(lambda: SILENCE_S)
        if not connection.closed:
            connection.lose(NodeLost(f"{self._worker} did nothing for {SILENCE_S:.0f} s"))
            connection.close()
