"""Runs an async reward, one that waits for a server, and chooses the runner for any reward (``start_runner``).

Invariants:

- Every item gets exactly one Score, within ``timeout_s`` of its turn, tries and pauses between them included. Failure
  is ``Score(None, error=...)``; it never raises in the trainer.
- At most ``max_concurrency`` items are under way. A reward that ignores its cancellation is left behind, and no longer
  counts.
- After ``close`` no task of the reward runs and its connections are closed.

Who waits for whom: callers wait for a future. The runner's own thread runs an event loop with one task an item. A
second thread watches the first: a reward that blocks the event loop fails the calls under way instead of hanging them.
"""

import asyncio
import concurrent.futures
import inspect
import random
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import OptionsHook, RewardError, check_options, resolve
from megatron_rl.rewards.workers.calls import Item, RewardItem, open_call
from megatron_rl.rewards.workers.processes import RewardRunner
from megatron_rl.rewards.workers.session import CallFailed, Transient, close_session
from megatron_rl.rewards.workers.worker import as_result, describe, failed

BACKOFF_S = 0.25
"""Pause before the second try, on average; it doubles with each further one."""
BLOCKED_GRACE_S = 10.0
"""Beyond an item's deadline, for an event loop that makes no progress."""
CLOSE_TIMEOUT_S = 5.0
_MIN_TRY_S = 0.01
"""With less left of the deadline, an item is not tried again."""

_TRANSIENT = (Transient, ConnectionError, TimeoutError)


def start_runner(
    name: str,
    *,
    num_workers: int = 2,
    timeout_s: float = 5.0,
    options: Mapping[str, Any] | None = None,
    row_fields: Sequence[str] = (),
    max_concurrency: int = 256,
    max_retries: int = 1,
    memory_limit_mb: int = 2048,
    start_timeout_s: float = 60.0,
) -> "RewardRunner | AsyncRewardRunner":
    """The runner that a reward needs: worker processes for a plain function, an event loop for an async one.

    Raises:
        RewardError: unknown reward, wrong options, or a reward that does not load.
    """
    if resolve(name).is_async:
        return AsyncRewardRunner(
            name,
            timeout_s=timeout_s,
            options=options,
            row_fields=row_fields,
            max_concurrency=max_concurrency,
            max_retries=max_retries,
            start_timeout_s=start_timeout_s,
        )
    return RewardRunner(
        name,
        num_workers=num_workers,
        timeout_s=timeout_s,
        options=options,
        row_fields=row_fields,
        memory_limit_mb=memory_limit_mb,
        max_retries=max_retries,
        start_timeout_s=start_timeout_s,
    )


class AsyncRewardRunner:
    """One async reward on an event loop of its own. Usable from any thread and any event loop; close it when done.

    Args:
        name: Registry name or import path of the reward.
        timeout_s: Seconds one item may take from its turn on, over all its tries.
        options: Keyword arguments of every call.
        row_fields: Keyword arguments that items bring as their third part.
        max_concurrency: Items under way at once.
        max_retries: Times an item is tried again after a transient error. A time-out is final.
        start_timeout_s: Seconds that an async ``prepare`` may take.

    Raises:
        RewardError: unknown or plain reward, wrong options, or a reward whose ``prepare`` fails.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float = 5.0,
        options: Mapping[str, Any] | None = None,
        row_fields: Sequence[str] = (),
        max_concurrency: int = 256,
        max_retries: int = 1,
        start_timeout_s: float = 60.0,
    ) -> None:
        reward = resolve(name)
        check_options(reward, options or {}, row_fields)
        if not reward.is_async:
            raise RewardError(f"reward {name!r} is a plain function: RewardRunner runs it in worker processes")
        if max_concurrency < 1 or timeout_s <= 0 or max_retries < 0:
            raise RewardError(
                f"reward {name!r}: expected max_concurrency >= 1, timeout_s > 0 and max_retries >= 0, "
                f"got {max_concurrency}, {timeout_s} and {max_retries}"
            )
        self.name = name
        self._function = reward.function
        self._options = dict(options or {})
        self._timeout_s = timeout_s
        self._max_concurrency = max_concurrency
        self._max_retries = max_retries
        self._pending: deque[Item] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._left_behind: set[asyncio.Task[Score | Exception]] = set()
        self._calls: set[concurrent.futures.Future[list[Score]]] = set()
        self._lock = threading.Lock()
        """Guards ``_calls`` and ``_failure``: once there is a failure, nothing more is queued."""
        self._failure: RewardError | None = None
        self._num_beats = 0
        """Counts turns of the event loop, for the watching thread."""
        self._loop = asyncio.new_event_loop()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name=f"reward-{name}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name=f"reward-{name}-watch", daemon=True).start()
        if reward.prepare is not None:
            self._prepare(reward.prepare, start_timeout_s)

    # ---------------------------------------------------------------------------------------------------- for callers

    async def score_many(self, items: Sequence[RewardItem]) -> list[Score]:
        """Scores in the order of ``items``. Cancelling the call drops its waiting items."""
        return await asyncio.wrap_future(self.submit(items))

    def score_many_blocking(self, items: Sequence[RewardItem]) -> list[Score]:
        """Like score_many, for callers without an event loop."""
        return self.submit(items).result()

    def submit(self, items: Sequence[RewardItem]) -> concurrent.futures.Future[list[Score]]:
        """Queue ``items`` and return at once. Every item ends by its deadline, so the future ends without one.

        Raises:
            RewardError: an item that is not (response, answer), or a runner that is closed or has failed.
        """
        future, queued = open_call(items)
        if not queued:
            return future
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._calls.add(future)
            self._loop.call_soon_threadsafe(self._enqueue, queued)
        future.add_done_callback(self._forget)
        return future

    def close(self) -> None:
        """End what is under way. Calls that wait end with a RewardError. Closing twice is fine."""
        self._fail(RewardError(f"reward runner {self.name!r} is closed"))
        self._closed.set()
        if self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._loop.stop)
            except RuntimeError:
                pass  # the loop ended in between
        self._thread.join(2 * CLOSE_TIMEOUT_S)

    def __enter__(self) -> "AsyncRewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, prepare: OptionsHook, timeout_s: float) -> None:
        try:
            if inspect.iscoroutinefunction(prepare):
                asyncio.run_coroutine_threadsafe(prepare(self._options), self._loop).result(timeout_s)
            else:
                prepare(self._options)
        except (Transient, CallFailed, TimeoutError) as error:
            self.close()
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise RewardError(f"reward {self.name!r} cannot start: {reason}; is its server up?") from error
        except BaseException:
            self.close()
            raise

    def _forget(self, future: concurrent.futures.Future[list[Score]]) -> None:
        with self._lock:
            self._calls.discard(future)

    def _fail(self, failure: RewardError) -> None:
        """Refuse further calls and end those under way."""
        with self._lock:
            self._failure = self._failure or failure
            unfinished = list(self._calls)
        for future in unfinished:
            try:
                future.set_exception(self._failure)
            except concurrent.futures.InvalidStateError:
                pass  # it has its scores, or its caller has cancelled it

    # -------------------------------------------------------------------------------------------- the runner's threads

    def _run_thread(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._beat)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._clean_up())
        finally:
            self._loop.close()

    def _beat(self) -> None:
        self._num_beats += 1
        self._loop.call_later(1.0, self._beat)

    def _watch(self) -> None:
        """Seconds are counted here, not read from a clock: a process that was stopped has not blocked anything."""
        num_beats, quiet_s = 0, 0
        while not self._closed.wait(1.0):
            quiet_s = quiet_s + 1 if self._num_beats == num_beats else 0
            num_beats = self._num_beats
            if quiet_s > self._timeout_s + BLOCKED_GRACE_S:
                self._fail(
                    RewardError(
                        f"reward {self.name!r} has blocked its event loop for {quiet_s} s: an async reward must await "
                        "whatever takes time. Make it a plain function, and it runs in worker processes"
                    )
                )
                return

    async def _clean_up(self) -> None:
        tasks = [*self._under_way, *self._left_behind]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        await close_session()

    def _enqueue(self, items: list[Item]) -> None:
        self._pending.extend(items)
        self._start_items()

    def _start_items(self) -> None:
        while self._pending and len(self._under_way) < self._max_concurrency:
            item = self._pending.popleft()
            if item.wanted:
                task = self._loop.create_task(self._score(item))
                self._under_way.add(task)
                task.add_done_callback(self._end_item)

    def _end_item(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not self._closed.is_set():
            self._start_items()

    # ---------------------------------------------------------------------------------------------------- one item

    async def _score(self, item: Item) -> None:
        deadline = self._loop.time() + self._timeout_s
        outcome = await self._try(item, deadline)
        num_tries = 1
        while not isinstance(outcome, Score) and num_tries <= self._max_retries:
            pause_s = BACKOFF_S * 2 ** (num_tries - 1) * random.uniform(0.5, 1.5)
            if self._loop.time() + pause_s + _MIN_TRY_S > deadline:
                break
            await asyncio.sleep(pause_s)
            outcome = await self._try(item, deadline)
            num_tries += 1
        if isinstance(outcome, Exception):
            outcome = Score(*failed(f"{describe(outcome)} (tries: {num_tries})"))
        item.finish(outcome)

    async def _try(self, item: Item, deadline: float) -> Score | Exception:
        """The score, or the transient error that keeps it away."""
        task = self._loop.create_task(self._call(item))
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)
        # Not a cancelling time-out: it would wait for a reward that ignores its cancellation.
        await asyncio.wait({task}, timeout=max(0.0, deadline - self._loop.time()))
        if task.cancelled():
            return Score(*failed("the reward cancelled itself"))
        if task.done():
            return task.result()
        task.cancel()
        return Score(None, error=f"timed out after {self._timeout_s:g} s")

    async def _call(self, item: Item) -> Score | Exception:
        response, answer, fields = item.payload
        try:
            return Score(*as_result(await self._function(response, answer, **self._options, **fields)))
        except asyncio.CancelledError:
            raise  # by the deadline, by close, or by the reward itself: the one who waits can tell
        except _TRANSIENT as error:
            return error
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: they would end the event loop
            return Score(*failed(describe(error)))
