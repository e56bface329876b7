"""Runs an async reward, which waits for a server, and chooses the runner for any reward (``start_runner``).

Invariants:

- Every item gets exactly one Score, within ``timeout_s`` of its start, including retries and the pauses between them. A failure
  is ``Score(None, error=...)`` and never raises in the trainer.
- At most ``max_concurrency`` items are in progress. A reward that ignores its cancellation no longer counts.
- After ``close`` no task of the reward runs and its connections are closed.

Which thread waits for which: callers wait for a future. The runner's own thread runs an event loop with one task per item. A
second thread watches it: a reward that blocks the event loop fails the calls in progress instead of hanging them.
"""

import asyncio
import inspect
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import OptionsHook, RewardError, resolve
from megatron_rl.rewards.workers.calls import CallQueue, Item, RunnerSettings
from megatron_rl.rewards.workers.processes import RewardRunner
from megatron_rl.rewards.workers.session import RewardCallError, Transient, close_session
from megatron_rl.rewards.workers.worker import as_result, describe, failed
from megatron_rl.system.http.json_http import backoff_s

BACKOFF_S = 0.25
"""Mean pause before the first retry; each later pause is twice as long."""
BLOCKED_GRACE_S = 10.0
"""Seconds beyond an item's timeout after which an event loop counts as blocked."""
CLOSE_TIMEOUT_S = 5.0
_MIN_TRY_S = 0.01
"""An item is not retried with less time left."""

_TRANSIENT = (Transient, ConnectionError, TimeoutError)


def start_runner(
    name: str,
    settings: RunnerSettings | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    row_fields: Sequence[str] = (),
) -> CallQueue:
    """Start the runner of a reward: worker processes for a plain function, an event loop for an async function.

    Raises:
        RewardError: unknown reward, wrong options, or a reward that cannot be imported.
    """
    runner = AsyncRewardRunner if resolve(name).is_async else RewardRunner
    return runner(name, settings, options=options, row_fields=row_fields)


class AsyncRewardRunner(CallQueue):
    """Runs one async reward on its own event loop. Raises RewardError if its ``prepare`` fails."""

    def __init__(self, name: str, settings: RunnerSettings | None = None, **arguments: Any) -> None:
        super().__init__(name, settings, **arguments)
        self._function = self._reward.function
        self._arguments = self._reward.arguments(self._options)
        self._in_progress: set[asyncio.Task[None]] = set()
        self._calls_of_reward: set[asyncio.Task[Score | Exception]] = set()
        self._num_beats = 0
        """Number of times that the event loop has run ``_beat``, for the watching thread."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name=f"reward-{name}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name=f"reward-{name}-watch", daemon=True).start()
        if self._reward.prepare is not None:
            self._prepare(self._reward.prepare)

    def _check_settings(self) -> None:
        settings = self._settings
        if not self._reward.is_async:
            raise RewardError(f"reward {self.name!r} is a plain function: RewardRunner runs it in worker processes")
        if settings.max_concurrency < 1 or settings.timeout_s <= 0 or settings.max_retries < 0:
            raise RewardError(
                f"reward {self.name!r}: expected max_concurrency >= 1, timeout_s > 0 and max_retries >= 0, "
                f"got {settings.max_concurrency}, {settings.timeout_s} and {settings.max_retries}"
            )

    def close(self) -> None:
        self._fail(RewardError(f"reward runner {self.name!r} is closed"))
        self._closed.set()
        if self._thread.is_alive():
            with suppress(RuntimeError):  # the loop ended in between
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * CLOSE_TIMEOUT_S)

    def _prepare(self, prepare: OptionsHook) -> None:
        timeout_s = self._settings.start_timeout_s
        try:
            if inspect.iscoroutinefunction(prepare):
                asyncio.run_coroutine_threadsafe(prepare(self._options), self._loop).result(timeout_s)
            else:
                prepare(self._options)
        except (Transient, RewardCallError, TimeoutError) as error:
            self.close()
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise RewardError(f"reward {self.name!r} cannot start: {reason}; is its server up?") from error
        except BaseException:
            self.close()
            raise

    def _fail(self, failure: RewardError) -> None:
        self._refuse(failure)
        self._end_calls()

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
        """Fail all calls once the event loop is blocked.

        Counts seconds instead of reading a clock, because a stopped process blocks nothing.
        """
        num_beats, quiet_s = 0, 0
        while not self._closed.wait(1.0):
            quiet_s = quiet_s + 1 if self._num_beats == num_beats else 0
            num_beats = self._num_beats
            if quiet_s > self._settings.timeout_s + BLOCKED_GRACE_S:
                self._fail(
                    RewardError(
                        f"reward {self.name!r} has blocked its event loop for {quiet_s} s: an async reward must await "
                        "every slow call. As a plain function it would run in worker processes"
                    )
                )
                return

    async def _clean_up(self) -> None:
        tasks = [*self._in_progress, *self._calls_of_reward]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        await close_session()

    def _enqueue(self, items: list[Item]) -> None:
        self._pending.extend(items)
        self._start_items()

    def _start_items(self) -> None:
        while self._pending and len(self._in_progress) < self._settings.max_concurrency:
            item = self._pending.popleft()
            if item.wanted:
                task = self._loop.create_task(self._score(item))
                self._in_progress.add(task)
                task.add_done_callback(self._end_item)

    def _end_item(self, task: asyncio.Task[None]) -> None:
        self._in_progress.discard(task)
        if not self._closed.is_set():
            self._start_items()

    # ---------------------------------------------------------------------------------------------------- one item

    async def _score(self, item: Item) -> None:
        deadline = self._loop.time() + self._settings.timeout_s
        outcome = await self._try(item, deadline)
        num_tries = 1
        for pause_s in backoff_s(self._settings.max_retries, BACKOFF_S, jitter=0.5):
            if isinstance(outcome, Score) or self._loop.time() + pause_s + _MIN_TRY_S > deadline:
                break
            await asyncio.sleep(pause_s)
            outcome = await self._try(item, deadline)
            num_tries += 1
        if isinstance(outcome, Exception):
            outcome = Score(*failed(f"{describe(outcome)} (tries: {num_tries})"))
        item.finish(outcome)

    async def _try(self, item: Item, deadline: float) -> Score | Exception:
        """The score, or a transient error."""
        task = self._loop.create_task(self._call(item))
        self._calls_of_reward.add(task)
        task.add_done_callback(self._calls_of_reward.discard)
        # asyncio.timeout would wait for a reward that ignores its cancellation.
        await asyncio.wait({task}, timeout=max(0.0, deadline - self._loop.time()))
        if task.cancelled():
            return Score(*failed("the reward cancelled itself"))
        if task.done():
            return task.result()
        task.cancel()
        return Score(None, error=f"timed out after {self._settings.timeout_s:g} s")

    async def _call(self, item: Item) -> Score | Exception:
        response, answer, fields = item.payload
        try:
            return Score(*as_result(await self._function(response, answer, **self._arguments, **fields)))
        except asyncio.CancelledError:
            raise  # by the deadline, by close or by the reward itself; the waiting task distinguishes them
        except _TRANSIENT as error:
            return error
        except BaseException as error:  # also SystemExit and KeyboardInterrupt, which would end the event loop
            return Score(*failed(describe(error)))
