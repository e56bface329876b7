"""Calls and their items, and what both reward runners do for their callers (``CallQueue``).

Invariants: every item gets one score, the first; a call's future ends when its last item has one. Items are touched by
the runner's own thread only.
"""

import asyncio
import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import RewardError

RewardItem = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
"""(response, answer), or (response, answer, row fields)."""
_Future = concurrent.futures.Future[list[Score]]


@dataclass(frozen=True)
class RunnerSettings:
    """How the items of one reward are run; each runner reads what concerns it."""

    num_workers: int = 2
    """Worker processes, of a plain reward."""
    timeout_s: float = 5.0
    """Seconds one item may take; of an async reward, from its turn on and over all its tries."""
    memory_limit_mb: int = 2048
    """What one worker may allocate beyond what it starts with."""
    max_concurrency: int = 256
    """Items in progress at once, of an async reward."""
    max_retries: int = 1
    """Times an item is tried again after its worker died at it, or after a transient error. A time-out is final."""
    start_timeout_s: float = 60.0
    """Seconds that importing the reward, or its async ``prepare``, may take."""


@dataclass
class _Call:
    """One call of score_many."""

    scores: list[Score | None]
    future: _Future
    num_open: int


@dataclass(eq=False)
class Item:
    call: _Call
    index: int
    payload: tuple[str, str, dict[str, Any]]
    num_crashes: int = 0
    done: bool = False

    def finish(self, score: Score) -> None:
        """The first score counts; an item given to two workers may get a second one."""
        if self.done:
            return
        self.done = True
        call = self.call
        call.scores[self.index] = score
        call.num_open -= 1
        if call.num_open == 0:
            with suppress(concurrent.futures.InvalidStateError):  # the caller has cancelled it meanwhile
                call.future.set_result([score for score in call.scores if score is not None])

    @property
    def wanted(self) -> bool:
        return not self.done and not self.call.future.done()


class CallQueue(ABC):
    """Items that wait for a runner's own thread, and the futures of their callers.

    Usable from any thread and any event loop; close it when done.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.new_event_loop()
        """Of the runner's own thread."""
        self._pending: deque[Item] = deque()
        self._calls: set[_Future] = set()
        self._lock = threading.Lock()
        """Guards ``_calls`` and ``_failure``: once there is a failure, nothing more is queued."""
        self._failure: RewardError | None = None

    async def score_many(self, items: Sequence[RewardItem]) -> list[Score]:
        """Scores in the order of ``items``. Cancelling the call drops its waiting items."""
        return await asyncio.wrap_future(self.submit(items))

    def score_many_blocking(self, items: Sequence[RewardItem]) -> list[Score]:
        """Like score_many, for callers without an event loop."""
        return self.submit(items).result()

    def submit(self, items: Sequence[RewardItem]) -> _Future:
        """Queue ``items`` and return at once. Every item ends by its deadline, so the future ends without one.

        Raises:
            RewardError: an item that is not (response, answer), or a runner that is closed or has failed.
        """
        payloads = [_check_item(index, item) for index, item in enumerate(items)]
        future: _Future = concurrent.futures.Future()
        if not payloads:
            future.set_result([])
            return future
        call = _Call([None] * len(payloads), future, len(payloads))
        queued = [Item(call, index, payload) for index, payload in enumerate(payloads)]
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._calls.add(future)
            # Inside the lock: a runner that ends now either refuses this call or finds it.
            self._loop.call_soon_threadsafe(self._enqueue, queued)
        future.add_done_callback(self._forget)
        return future

    @abstractmethod
    def close(self) -> None:
        """End what is in progress. Calls that wait end with a RewardError. Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _enqueue(self, items: list[Item]) -> None:
        """Take new items, in the runner's own thread."""

    def _forget(self, future: _Future) -> None:
        with self._lock:
            self._calls.discard(future)

    def _refuse(self, failure: RewardError) -> None:
        """Take no further calls; the first failure is the one that callers see."""
        with self._lock:
            self._failure = self._failure or failure

    def _end_calls(self) -> None:
        """End the calls that are open, once new ones are refused."""
        with self._lock:
            failure = self._failure or RewardError(f"reward runner {self.name!r} has ended")
            unfinished = list(self._calls)
        for future in unfinished:
            with suppress(concurrent.futures.InvalidStateError):  # it has its scores, or its caller has cancelled it
                future.set_exception(failure)


def _check_item(index: int, item: RewardItem) -> tuple[str, str, dict[str, Any]]:
    response, answer, *rest = item
    if not isinstance(response, str) or not isinstance(answer, str):
        raise RewardError(
            f"item {index}: expected (response, answer) as text, "
            f"got ({type(response).__name__}, {type(answer).__name__})"
        )
    return response, answer, dict(rest[0]) if rest else {}
