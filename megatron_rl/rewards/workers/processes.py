"""Scores responses in killable worker processes, each item under its own deadline.

Invariants:

- Every item gets exactly one Score. An item that hangs, crashes its worker, exceeds its memory or raises gets
  ``Score(None, error=...)``: never 0, and it never raises in the trainer.
- A slow item delays the rest of its chunk only for ``_STALL_S``: then the rest goes to other workers. If every worker hangs,
  the queue waits for the first deadline.
- All processes that a reward has started are killed by ``close``, and when the trainer is killed.

Which process waits for which: callers wait for a future. The runner's own thread runs an event loop with one task per worker.
A task waits for its worker at most until the item's deadline, then the fork server kills and replaces the worker. The same
thread starts the fork server, because a child dies with the thread that started it, and this thread outlives the callers'
event loops.
"""

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rewards.workers.calls import CallQueue, Item, RunnerSettings
from megatron_rl.rewards.workers.fork_server import CLOSE_TIMEOUT_S, ForkServerClient, ForkServerLost, RewardWorker
from megatron_rl.system.processes.child_process import describe_end, pack_frame

logger = logging.getLogger(__name__)
_MAX_CHUNK_ITEMS = 64
_MAX_CHUNK_CHARS = 1 << 20
_STALL_S = 0.1
"""After this time an item keeps its worker alone, and the rest of the chunk goes to other workers."""
_PICKUP_GRACE_S = 5.0
"""Added to the deadline of a worker that has not started an item: it may be starting, on a busy machine."""
_MAX_CONSECUTIVE_CRASHES = 8
"""Maximum number of consecutive workers that exit without a result and between items."""
_MAX_FORK_SERVER_RESTARTS = 3


@dataclass
class _Chunk:
    items: list[Item]
    sent_at: float
    """Monotonic seconds."""
    spread: bool = False
    """True once all items except the slow one are back in the queue."""

    def item_at(self, position: int) -> Item | None:
        """The item at ``position``; None if the worker is between items."""
        return self.items[position] if 0 <= position < len(self.items) else None


class RewardRunner(CallQueue):
    """Runs one plain reward in persistent worker processes. Raises RewardError if a worker cannot import the reward."""

    def __init__(self, name: str, settings: RunnerSettings | None = None, **arguments: Any) -> None:
        super().__init__(name, settings, **arguments)
        self._fork_server = ForkServerClient(self._reward.path, self._options, self._settings)
        self._num_restarts = 0
        self._num_consecutive_crashes = 0
        self._reported_ends: set[str] = set()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_thread, args=(started,), name="reward-runner", daemon=True)
        self._thread.start()
        started.result()

    def _check_settings(self) -> None:
        settings = self._settings
        if self._reward.is_async:
            raise RewardError(f"reward {self.name!r} is async: start_runner (event_loop.py) chooses the runner")
        if settings.num_workers < 1 or settings.timeout_s <= 0:
            raise RewardError(
                f"reward {self.name!r}: expected num_workers >= 1 and timeout_s > 0, "
                f"got {settings.num_workers} and {settings.timeout_s}"
            )

    def close(self) -> None:
        """Stop all processes. Calls in progress end with a RewardError. A second call does nothing."""
        with self._lock:
            if self._failure is None:
                self._loop.call_soon_threadsafe(self._stop.set)
        # The fork server may need its timeout twice: to exit, and to exit after a kill.
        timeout_s = 3 * CLOSE_TIMEOUT_S
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RewardError(f"reward runner {self.name!r} waited {timeout_s:g} s for its processes to exit; they exit with this process")

    # -------------------------------------------------------------------------------------------- the runner's thread

    def _run_thread(self, started: concurrent.futures.Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(started))
        except (RewardError, OSError) as error:
            if started.done():
                raise
            started.set_exception(error)  # raised by the constructor, which waits
        finally:
            self._loop.close()

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._stop = asyncio.Event()
        self._work = asyncio.Event()
        self._reviving = asyncio.Lock()
        try:
            await self._start_fork_server()
        except (RewardError, OSError):
            self._fork_server.release()
            raise
        started.set_result(None)
        tasks = [asyncio.create_task(self._run_worker(slot)) for slot in range(self._settings.num_workers)]
        stop = asyncio.create_task(self._stop.wait())
        try:
            # A worker's task ends only with an error, and the first error ends the runner.
            finished, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
            errors = [task.exception() for task in finished if task is not stop and task.exception()]
            how = f"failed: {errors[0]}" if errors else "is closed"
            self._refuse(RewardError(f"reward runner {self.name!r} {how}"))
        finally:
            for task in [stop, *tasks]:
                task.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)
            self._fork_server.stop()
            self._fork_server.release()
            self._end_calls()  # last, so that no process is left when a caller continues

    def _enqueue(self, items: list[Item]) -> None:
        self._pending.extend(items)
        self._work.set()

    def _requeue(self, items: list[Item], *, first: bool) -> None:
        wanted = [item for item in items if item.wanted]
        if first:
            self._pending.extendleft(reversed(wanted))  # extendleft reverses the order
        else:
            self._pending.extend(wanted)
        if wanted:
            self._work.set()

    async def _take_chunk(self) -> list[Item]:
        """Wait for items. Chunks shrink towards the end of the queue, so that the workers finish at about the same time."""
        while True:
            chunk: list[Item] = []
            num_chars = 0
            size = min(_MAX_CHUNK_ITEMS, max(1, len(self._pending) // (2 * self._settings.num_workers)))
            while self._pending and len(chunk) < size and num_chars < _MAX_CHUNK_CHARS:
                item = self._pending.popleft()
                if item.wanted:
                    chunk.append(item)
                    num_chars += len(item.payload[0])
            if chunk:
                return chunk
            self._work.clear()
            await self._work.wait()

    async def _run_worker(self, slot_index: int) -> None:
        """Keep one worker busy; replace a worker that exits, hangs or reports that it must be replaced."""
        worker: RewardWorker | None = None
        chunk: list[Item] = []
        generation = 0
        try:
            while True:
                if worker is None:
                    # Of the server that forks it, so before the fork: another task may restart the server meanwhile.
                    generation = self._num_restarts
                try:
                    worker = worker or await self._fork_server.fork(slot_index)
                    chunk, frame = _frame(await self._take_chunk())
                    if chunk and not await self._score_chunk(worker, chunk, frame):
                        worker = None
                except ForkServerLost as error:
                    self._requeue(chunk, first=True)
                    worker = None
                    await self._revive(generation, error)
        finally:
            if worker is not None:
                worker.writer.transport.abort()

    async def _revive(self, generation: int, error: ForkServerLost) -> None:
        async with self._reviving:
            if generation == self._num_restarts:  # otherwise another worker's task has restarted the fork server
                await self._start_fork_server(error)

    async def _start_fork_server(self, lost: ForkServerLost | None = None) -> None:
        """Start the fork server, after ``lost`` again. Raises RewardError if it was lost more often than restarts are allowed."""
        while True:
            if lost is not None:
                if self._num_restarts == _MAX_FORK_SERVER_RESTARTS:
                    often = f"for the {_MAX_FORK_SERVER_RESTARTS + 1}th time; check the memory of the machine (dmesg)"
                    failure = RewardError(f"reward runner {self.name!r} failed: {lost}, {often}")
                    self._refuse(failure)  # the other workers' tasks fail too, but know less
                    raise failure
                self._num_restarts += 1
                logger.warning("reward %r: %s; it is restarted, and no response is lost", self.name, lost)
                self._fork_server.stop()
            try:
                return await self._fork_server.start()
            except ForkServerLost as error:
                lost = error

    # --------------------------------------------------------------------------------------------- one chunk of items

    async def _score_chunk(self, worker: RewardWorker, items: list[Item], frame: bytes) -> bool:
        """Score a chunk, encoded as ``frame``. Returns True if the worker can take another chunk.

        Items without a score go back to the queue.
        """
        worker.progress.reset(len(items))
        chunk = _Chunk(items, time.monotonic())
        worker.writer.write(frame)
        reading = asyncio.ensure_future(worker.read_frame())
        try:
            while True:
                await asyncio.wait({reading}, timeout=min(_STALL_S, self._settings.timeout_s))
                if not reading.done():
                    if await self._watch(worker, chunk):
                        return False
                    continue
                message = reading.result()
                if message is None:
                    await self._blame_crash(worker, chunk)
                    return False
                self._record(chunk, message["results"])
                if message["done"]:
                    self._give_back(chunk)
                    if message["retire"]:
                        await self._fork_server.kill(worker)
                    return not message["retire"]
                reading = asyncio.ensure_future(worker.read_frame())
        finally:
            reading.cancel()

    def _record(self, chunk: _Chunk, results: list[list[Any]]) -> None:
        """Finish the items of ``results``: [position, value, detail, error, metrics] each."""
        if results:
            self._num_consecutive_crashes = 0
        for position, *result in results:
            chunk.items[position].finish(Score(*result))

    async def _watch(self, worker: RewardWorker, chunk: _Chunk) -> bool:
        """Check a silent worker: requeue the rest of its chunk if an item is slow, and kill the worker after the deadline.

        Returns True if the worker was killed.
        """
        position, since = worker.progress.read()
        slow = chunk.item_at(position)
        age_s = time.monotonic() - max(since, chunk.sent_at)  # the time may be from before this chunk
        if slow is not None and age_s > min(_STALL_S, self._settings.timeout_s):
            worker.progress.set_limit(position + 1)
            self._give_back(chunk, but=slow)
        if age_s <= self._settings.timeout_s + (_PICKUP_GRACE_S if slow is None else 0):
            return False
        await self._fork_server.kill(worker)
        if slow is None:
            self._give_back(chunk)
            self._count_crash("did not start its work")
        elif worker.progress.read() == (position, since):
            slow.finish(Score(None, error=f"timed out after {self._settings.timeout_s:g} s"))
        else:  # the item ended between the check and the kill
            self._requeue([slow], first=False)
        return True

    async def _blame_crash(self, worker: RewardWorker, chunk: _Chunk) -> None:
        """Handle the exit of a worker: count it against the item in progress, and requeue the other items."""
        how = describe_end(os.waitstatus_to_exitcode(await self._fork_server.kill(worker)))
        self._warn_of_end(how)
        position, _ = worker.progress.read()
        culprit = chunk.item_at(position)
        self._give_back(chunk, but=culprit)
        if culprit is None:
            self._count_crash(how)
            return
        culprit.num_crashes += 1
        if culprit.num_crashes > self._settings.max_retries:
            tries = f", {culprit.num_crashes} times" if culprit.num_crashes > 1 else ""
            culprit.finish(Score(None, error=f"the worker {how} at this response{tries}"))
        else:
            self._requeue([culprit], first=False)  # at the end, because it may crash another worker

    def _warn_of_end(self, how: str) -> None:
        """Warn once per kind of exit; the errors of the scores show how often a reward crashes."""
        if how not in self._reported_ends:
            self._reported_ends.add(how)
            logger.warning(
                "reward %r: a worker %s; another worker continues its work (reported once; unscored responses have their own errors)",
                self.name, how,
            )  # fmt: skip

    def _give_back(self, chunk: _Chunk, *, but: Item | None = None) -> None:
        """Requeue the unfinished items of a chunk, once, before all other items."""
        if not chunk.spread:
            chunk.spread = True
            self._requeue([item for item in chunk.items if item is not but], first=True)

    def _count_crash(self, how: str) -> None:
        self._num_consecutive_crashes += 1
        if self._num_consecutive_crashes > _MAX_CONSECUTIVE_CRASHES:
            raise RewardError(f"{self._num_consecutive_crashes} consecutive workers ended before they scored an item; the last one {how}")


def _frame(items: list[Item]) -> tuple[list[Item], bytes]:
    """The items that JSON can represent, and their frame; other items are unscored."""
    try:
        return items, pack_frame([item.payload for item in items])
    except (TypeError, ValueError) as error:
        if len(items) > 1:
            return _frame([item for item in items if _frame([item])[0]])
        for item in items:
            item.finish(Score(None, error=f"the row's fields are not plain JSON values: {error}"))
        return [], b""
