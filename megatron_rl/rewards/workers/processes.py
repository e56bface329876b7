"""Scores responses in killable worker processes, each item under its own deadline.

Invariants:

- Every item gets exactly one Score. An item that hangs, crashes its worker, eats its memory or raises gets
  ``Score(None, error=...)``: it is never scored 0 for that, and it never raises in the trainer.
- An item waits for a slow one only until the runner notices (``_STALL_S``): the rest of the chunk then goes to other
  workers. If every worker hangs, the queue waits for the first deadline.
- Whatever a reward started is dead after ``close``, and when the trainer is killed.

Which process waits for which: callers wait for a future. The runner's own thread runs an event loop with one task per worker.
A task waits for its worker at most until the item's deadline, then has the fork server kill and replace it. The same thread
starts the fork server, because a child dies with the thread that started it, and this thread outlives the callers' event loops.
"""

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import RewardError, check_options, resolve
from megatron_rl.rewards.workers.calls import CallQueue, Item, RunnerSettings
from megatron_rl.rewards.workers.fork_server import (
    CLOSE_TIMEOUT_S,
    ForkServerClient,
    ForkServerLost,
    RewardWorker,
)
from megatron_rl.system.processes.child_process import describe_end, pack_frame

logger = logging.getLogger(__name__)
_MAX_CHUNK_ITEMS = 64
_MAX_CHUNK_CHARS = 1 << 20
_STALL_S = 0.1
"""An item that runs for longer than this gets its worker alone; the rest of the chunk moves on."""
_PICKUP_GRACE_S = 5.0
"""Added to the deadline of a worker that scores no item yet: it reads a chunk, or starts on a busy machine."""
_MAX_CONSECUTIVE_CRASHES = 8
"""Workers that may end in a row without a result and without an item to blame."""
_MAX_FORK_SERVER_RESTARTS = 3


@dataclass
class _Chunk:
    items: list[Item]
    sent_at: float
    """Monotonic seconds."""
    spread: bool = False
    """True once the items other than the slow one are back in the queue."""

    def item_at(self, position: int) -> Item | None:
        """The item at ``position``; None if the worker is between items."""
        return self.items[position] if 0 <= position < len(self.items) else None


class RewardRunner(CallQueue):
    """Persistent worker processes for one plain reward.

    Args:
        name: Registry name or import path of the reward.
        options: Keyword arguments of every call.
        row_fields: Keyword arguments that every item brings as its third part.

    Raises:
        RewardError: unknown reward, wrong options, or a reward that does not load in a worker.
    """

    def __init__(
        self,
        name: str,
        settings: RunnerSettings | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        row_fields: Sequence[str] = (),
    ) -> None:
        reward = resolve(name)
        check_options(reward, options or {}, row_fields)
        self._settings = settings = settings or RunnerSettings()
        if reward.is_async:
            raise RewardError(f"reward {name!r} is async: start_runner (event_loop.py) starts the runner that it needs")
        if settings.num_workers < 1 or settings.timeout_s <= 0:
            raise RewardError(
                f"reward {name!r}: expected num_workers >= 1 and timeout_s > 0, "
                f"got {settings.num_workers} and {settings.timeout_s}"
            )
        super().__init__(name)
        self._fork_server = ForkServerClient(reward.path, dict(options or {}), settings)
        self._num_restarts = 0
        self._num_consecutive_crashes = 0
        self._deaths_told: set[str] = set()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_thread, args=(started,), name="reward-runner", daemon=True)
        self._thread.start()
        started.result()

    def close(self) -> None:
        """Stop all processes. Calls in progress end with a RewardError. Closing twice is fine."""
        with self._lock:
            if self._failure is None:
                self._loop.call_soon_threadsafe(self._stop.set)
        # The fork server may use its timeout twice: to end by itself, and to end once killed.
        timeout_s = 3 * CLOSE_TIMEOUT_S
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RewardError(
                f"reward runner {self.name!r} waited {timeout_s:g} s for its processes to end; they end with this one"
            )

    # -------------------------------------------------------------------------------------------- the runner's thread

    def _run_thread(self, started: concurrent.futures.Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(started))
        except (RewardError, OSError) as error:
            if started.done():
                raise
            started.set_exception(error)  # the constructor, which waits for it, raises it
        finally:
            self._loop.close()

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._stop = asyncio.Event()
        self._work = asyncio.Event()
        self._reviving = asyncio.Lock()
        try:
            await self._fork_server.start()
        except (RewardError, OSError):
            self._fork_server.release()
            raise
        started.set_result(None)
        tasks = [asyncio.create_task(self._run_worker(slot)) for slot in range(self._settings.num_workers)]
        stop = asyncio.create_task(self._stop.wait())
        try:
            # A worker's task ends by an error only, and the first error is the runner's end.
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
            self._end_calls()  # last: a caller that goes on finds no process left

    def _enqueue(self, items: list[Item]) -> None:
        self._pending.extend(items)
        self._work.set()

    def _requeue(self, items: list[Item], *, first: bool) -> None:
        wanted = [item for item in items if item.wanted]
        if first:
            self._pending.extendleft(reversed(wanted))  # extendleft turns the order around
        else:
            self._pending.extend(wanted)
        if wanted:
            self._work.set()

    async def _take_chunk(self) -> list[Item]:
        """Wait for items. Chunks shrink towards the end of the queue, so that the workers finish together."""
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
        """Keep one worker busy; replace it when it dies, hangs or reports that it must be replaced."""
        worker: RewardWorker | None = None
        chunk: list[Item] = []
        try:
            while True:
                generation = self._num_restarts  # before the fork: another task may restart the server meanwhile
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
            if generation != self._num_restarts:
                return  # another worker's task did it
            if self._num_restarts == _MAX_FORK_SERVER_RESTARTS:
                raise RewardError(
                    f"{error}, for the {_MAX_FORK_SERVER_RESTARTS + 1}th time; is the machine out of memory?"
                )
            self._num_restarts += 1
            logger.warning("reward %r: %s; it is started again and no response is lost", self.name, error)
            self._fork_server.stop()
            await self._fork_server.start()

    # --------------------------------------------------------------------------------------------- one chunk of items

    async def _score_chunk(self, worker: RewardWorker, items: list[Item], frame: bytes) -> bool:
        """Score a chunk, packed in ``frame``; True if the worker can take another.

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
        """Results are [position, value, detail, error, metrics]."""
        if results:
            self._num_consecutive_crashes = 0
        for position, *result in results:
            chunk.items[position].finish(Score(*result))

    async def _watch(self, worker: RewardWorker, chunk: _Chunk) -> bool:
        """Check a worker that sent nothing: requeue the rest of its chunk if one item is slow, kill it past the deadline.

        Returns True if the worker was killed.
        """
        position, since = worker.progress.read()
        slow = chunk.item_at(position)
        age_s = time.monotonic() - max(since, chunk.sent_at)  # it may be a time from before this chunk
        if slow is not None and age_s > min(_STALL_S, self._settings.timeout_s):
            worker.progress.set_limit(position + 1)
            self._give_back(chunk, but=slow)
        if age_s <= self._settings.timeout_s + (_PICKUP_GRACE_S if slow is None else 0):
            return False
        await self._fork_server.kill(worker)
        if slow is None:
            self._give_back(chunk)
            self._count_crash("did not take its work")
        elif worker.progress.read() == (position, since):
            slow.finish(Score(None, error=f"timed out after {self._settings.timeout_s:g} s"))
        else:  # the item ended between the check and the kill
            self._requeue([slow], first=False)
        return True

    async def _blame_crash(self, worker: RewardWorker, chunk: _Chunk) -> None:
        """Handle a worker's death: blame the item that it was scoring, requeue the others."""
        how = describe_end(os.waitstatus_to_exitcode(await self._fork_server.kill(worker)))
        self._tell_of_death(how)
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
            self._requeue([culprit], first=False)  # at the end: it may cost another worker

    def _tell_of_death(self, how: str) -> None:
        """Warn once for each kind of end: the errors of its scores show a reward that crashes at many responses."""
        if how not in self._deaths_told:
            self._deaths_told.add(how)
            logger.warning(
                "reward %r: a worker %s; another one takes its work (said once; what stays unscored says so itself)",
                self.name, how,
            )  # fmt: skip

    def _give_back(self, chunk: _Chunk, *, but: Item | None = None) -> None:
        """Requeue the unfinished items of a chunk, once, ahead of all others."""
        if not chunk.spread:
            chunk.spread = True
            self._requeue([item for item in chunk.items if item is not but], first=True)

    def _count_crash(self, how: str) -> None:
        self._num_consecutive_crashes += 1
        if self._num_consecutive_crashes > _MAX_CONSECUTIVE_CRASHES:
            raise RewardError(
                f"{self._num_consecutive_crashes} workers in a row ended before they scored anything; the last one {how}"
            )


def _frame(items: list[Item]) -> tuple[list[Item], bytes]:
    """The items that JSON can represent, and their frame; the other items stay unscored."""
    try:
        return items, pack_frame([item.payload for item in items])
    except (TypeError, ValueError) as error:
        if len(items) > 1:
            return _frame([item for item in items if _frame([item])[0]])
        for item in items:
            item.finish(Score(None, error=f"the row's fields are no plain JSON values: {error}"))
        return [], b""
