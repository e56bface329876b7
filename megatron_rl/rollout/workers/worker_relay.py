"""Calls that a rollout worker of the driver's machine passes on to one of another node, over one kept connection.

The other worker makes the call and keeps what is large, the routes, in its own shared file; tokens and log-probs come here
with the reply. Who waits for whom: ``call`` for that worker, which has to show that its event loop turns.
"""

import asyncio

from megatron_rl.rollout.requests import BatchReply, WorkerLost
from megatron_rl.rollout.workers.worker_connection import SILENCE_S, WorkerConnection
from megatron_rl.rollout.workers.worker_frames import STREAM_BYTES
from megatron_rl.rollout.workers.worker_messages import FILE, Free, NodeLost, RemoteCall, RemoteWorkerInfo
from megatron_rl.system.files.shared_file import FarView, Place

_CONNECT_TIMEOUT_S = 30.0


class Relay:
    """To one worker of another node."""

    def __init__(self, worker: RemoteWorkerInfo, number: int) -> None:
        self._worker, self._number = worker, number
        self._view = FarView(worker.pid, worker.fd)
        self._line: WorkerConnection | None = None
        self._connecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, call: RemoteCall) -> BatchReply:
        """Raises as ``BatchCaller.call``, and WorkerLost or NodeLost."""
        line = await self._connected()
        for start, num_bytes in call.freed:
            line.send(Free(start, num_bytes))
        reply: BatchReply = await line.ask(call.batch)
        return reply

    def place_of(self, raw: memoryview) -> Place | None:
        """Of an array that stayed on the other node, as the owner counts places."""
        place = self._view.place_of(raw)
        return None if place is None else place._replace(start=self._number * FILE + place.start)

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
                self._line = line = WorkerConnection(reader, writer, self._view)
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
