"""Calls of a reward, their items, and the queue that both reward runners share (``CallQueue``).

Invariants: every item gets exactly one score, and later scores are ignored; a call's future is done once all its items have a
score. Only the runner's own thread uses items.
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
from megatron_rl.rewards.registry import RewardError, check_options, resolve

RewardItem = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
"""(response, answer), or (response, answer, row fields)."""
_Future = concurrent.futures.Future[list[Score]]


@dataclass(frozen=True)
class RunnerSettings:
    """Limits for the items of one reward; each runner reads the fields that it needs."""

    num_workers: int = 2
    """Number of worker processes of a plain reward."""
    timeout_s: float = 5.0
    """Seconds per item; for an async reward from the start of its first try, retries included."""
    memory_limit_mb: int = 2048
    """Megabytes that one worker may allocate on top of its size at the start."""
    max_concurrency: int = 256
    """Maximum number of items that an async reward scores concurrently."""
    max_retries: int = 1
    """Retries of an item after a crash of its worker or a transient error. A timeout is final."""
    start_timeout_s: float = 60.0
    """Seconds for importing the reward, or for its async ``prepare``."""


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
        """Set the score. A second score is ignored; an item that was given to two workers may get one."""
        if self.done:
            return
        self.done = True
        call = self.call
        call.scores[self.index] = score
        call.num_open -= 1
        if call.num_open == 0:
            with suppress(concurrent.futures.InvalidStateError):  # the caller has cancelled the call
                call.future.set_result([score for score in call.scores if score is not None])

    @property
    def wanted(self) -> bool:
        return not self.done and not self.call.future.done()


class CallQueue(ABC):
    """The items that wait for a runner, and the futures of their callers.

    Usable from any thread and any event loop; must be closed.
    """

    def __init__(
        self,
        name: str,
        settings: RunnerSettings | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        row_fields: Sequence[str] = (),
    ) -> None:
        """
        Args:
            name: Registry name or import path of the reward.
            options: Keyword arguments of every call.
            row_fields: Keyword arguments in the third field of every item.

        Raises:
            RewardError: unknown reward, or wrong options or settings.
        """
        self.name = name
        self._options = dict(options or {})
        self._settings = settings or RunnerSettings()
        self._reward = resolve(name)
        check_options(self._reward, self._options, row_fields)
        self._check_settings()
        self._loop = asyncio.new_event_loop()
        """The event loop of the runner's own thread."""
        self._pending: deque[Item] = deque()
        self._calls: set[_Future] = set()
        self._lock = threading.Lock()
        """Guards ``_calls`` and ``_failure``: nothing is queued after a failure."""
        self._failure: RewardError | None = None

    async def score_many(self, items: Sequence[RewardItem]) -> list[Score]:
        """Scores in the order of ``items``. Cancelling the call drops its waiting items."""
        return await asyncio.wrap_future(self.submit(items))

    def submit(self, items: Sequence[RewardItem]) -> _Future:
        """Queue ``items`` and return immediately. The future needs no timeout, because every item has a deadline.

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
        """Stop the runner. Waiting calls end with a RewardError. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _check_settings(self) -> None:
        """Raise RewardError if this runner cannot run the reward with its settings."""

    @abstractmethod
    def _enqueue(self, items: list[Item]) -> None:
        """Add new items; called on the runner's own thread."""

    def _forget(self, future: _Future) -> None:
        with self._lock:
            self._calls.discard(future)

    def _refuse(self, failure: RewardError) -> None:
        """Refuse further calls with the first failure."""
        with self._lock:
            self._failure = self._failure or failure

    def _end_calls(self) -> None:
        """Fail the calls in progress, after new calls are refused."""
        with self._lock:
            failure = self._failure or RewardError(f"reward runner {self.name!r} has ended")
            unfinished = list(self._calls)
        for future in unfinished:
            with suppress(concurrent.futures.InvalidStateError):  # the call has finished or was cancelled
                future.set_exception(failure)


def _check_item(index: int, item: RewardItem) -> tuple[str, str, dict[str, Any]]:
    response, answer, *rest = item
    if not isinstance(response, str) or not isinstance(answer, str):
        raise RewardError(
            f"item {index}: expected (response, answer) as text, "
            f"got ({type(response).__name__}, {type(answer).__name__})"
        )
    return response, answer, dict(rest[0]) if rest else {}
