"""Calls that rollout workers of other nodes make, so that routes stay on the node where they are read.

All that exists for them beside their start (``remote_workers.py``). The owner (``worker_pool.py``) gives a call for another node's
worker to a worker of its own machine, which passes it on over one kept connection (``Relay``). The remote worker makes the call
and keeps the routes in its own shared file; tokens and log-probs come back with the reply. The owner has addresses of the
routes, and its next call to that worker says which ranges it has dropped. Who waits for whom: ``Relay.call`` for the remote
worker, which has to show that its event loop turns.
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
from megatron_rl.rollout.workers.worker_connection import SILENCE_S, WorkerConnection
from megatron_rl.rollout.workers.worker_frames import STREAM_BYTES
from megatron_rl.rollout.workers.worker_messages import Free
from megatron_rl.system.files.shared_file import NODE, ArrayRange, MappedFile
from megatron_rl.system.http.json_http import NoHttpReply

_CONNECT_TIMEOUT_S = 30.0
_WARN_EVERY_S = 10.0
FILE = 1 << 48
"""Added n times to the first byte of a range in a reply that lies in the file of the remote worker n."""


class NodeLost(WorkerLost):
    """The workers of another node cannot be reached any more."""


class RemoteWorkerInfo(NamedTuple):
    """A rollout worker of another node."""

    host: str
    port: int
    secret: str
    """In hexadecimal digits; the first bytes on a connection."""
    pid: int
    """The process that keeps its shared file open, and its node, as in an address."""
    fd: int

    def __str__(self) -> str:
        return f"the rollout worker of node {self.pid // NODE} at {self.host}:{self.port}"


@dataclass(frozen=True)
class RemoteCall:
    """A question: the reply to a call that a worker of another node makes."""

    worker: RemoteWorkerInfo
    number: int
    """The worker's number: a range of its file begins ``number * FILE`` bytes later in the reply."""
    batch: BatchCall
    freed: Sequence[tuple[int, int]]
    """(first byte, bytes) of the ranges that the owner has dropped."""


class RemoteWorker:
    """A worker of another node, as the owner knows it."""

    def __init__(self, worker: RemoteWorkerInfo, number: int) -> None:
        self.worker, self._number = worker, number
        self._lost = False
        self._warned_at = -math.inf
        self._unreached: set[str] = set()
        self.answered: set[str] = set()
        """URLs of servers that have answered it."""
        self.freed: deque[tuple[int, int]] = deque()
        """Ranges of its file that have been dropped here; the next call says so."""
        freed = self.freed
        self.file = MappedFile.remote(worker.pid, worker.fd, lambda first, num_bytes: freed.append((first, num_bytes)))

    def call(self, batch: BatchCall) -> RemoteCall:
        freed = [self.freed.popleft() for _ in range(len(self.freed))]
        return RemoteCall(self.worker, self._number, batch, freed)

    def reaches(self, url: str) -> bool:
        """True unless the worker is known not to reach the server. A loopback address means another machine there."""
        is_local = _is_loopback(urlsplit(url).hostname or "") and not _is_loopback(self.worker.host)
        return not (self._lost or is_local or url in self._unreached)

    def lose(self, error: WorkerLost) -> str:
        """Note a lost call; gives a warning, or an empty text."""
        if self._lost:
            return ""
        if isinstance(error, NodeLost):
            self._lost = True
            return f"{error}. It is given up: the calls to its servers are made on the driver's machine"
        began, self._warned_at = self._warned_at, time.monotonic()  # many calls are lost at once
        return "" if self._warned_at - began < _WARN_EVERY_S else f"{error}; it is started again, and its requests are sent again"

    def refused(self, url: str, error: NoHttpReply) -> str:
        """Note that a server did not answer; gives a warning, or an empty text."""
        if error.timed_out or url in self.answered | self._unreached:
            return ""
        self._unreached.add(url)
        return f"{self.worker} does not reach the server at {url} ({error}): the calls to it are made on the driver's machine"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def by_node(workers: Sequence[RemoteWorker]) -> list[list[RemoteWorker]]:
    nodes = sorted({one.worker.pid // NODE for one in workers})
    return [[one for one in workers if one.worker.pid // NODE == node] for node in nodes]


class ReplyFiles:
    """The files that arrays of replies lie in: the worker's, and those of other nodes' workers."""

    def __init__(self, own: MappedFile, far: Sequence[MappedFile]) -> None:
        self._files = [own, *far]
        self.range_of = own.range_of

    def at(self, range_: ArrayRange) -> np.ndarray:
        number, first = divmod(range_.first, FILE)
        return self._files[number].at(ArrayRange(first, range_.num_bytes))


class Relay:
    """To one worker of another node."""

    def __init__(self, worker: RemoteWorkerInfo, number: int) -> None:
        self._worker, self._number = worker, number
        self._file = MappedFile.remote(worker.pid, worker.fd)
        self._line: WorkerConnection | None = None
        self._connecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, call: RemoteCall) -> BatchReply:
        """Raises as ``BatchCaller.call``, and WorkerLost or NodeLost."""
        line = await self._connected()
        if call.freed:
            line.send(Free(call.freed))
        reply: BatchReply = await line.ask(call.batch)
        return reply

    def range_of(self, raw: memoryview) -> ArrayRange | None:
        """The range of an array that stayed on the other node, as the owner counts."""
        found = self._file.range_of(raw)
        return None if found is None else ArrayRange(self._number * FILE + found.first, found.num_bytes)

    async def _connected(self) -> WorkerConnection:
        async with self._connecting:
            if self._line is None or self._line.over:
                try:
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        worker = self._worker
                        reader, writer = await asyncio.open_connection(worker.host, worker.port, limit=STREAM_BYTES)
                except (OSError, TimeoutError) as error:
                    raise NodeLost(
                        f"{self._worker} cannot be reached within {_CONNECT_TIMEOUT_S:.0f} s: {type(error).__name__}: {error}"
                    ) from error
                writer.write(bytes.fromhex(self._worker.secret))
                self._line = line = WorkerConnection(reader, writer, self._file)
                for work in (self._read(line), self._watch(line)):
                    task = asyncio.get_running_loop().create_task(work)
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            return self._line

    async def _read(self, line: WorkerConnection) -> None:
        failure = await line.read()
        line.lose(WorkerLost(f"{self._worker} {failure or 'has closed its connection'}"))

    async def _watch(self, line: WorkerConnection) -> None:
        await line.seconds_since_reply(lambda: SILENCE_S)
        if not line.over:
            line.lose(NodeLost(f"{self._worker} did nothing for {SILENCE_S:.0f} s"))
            line.close()
