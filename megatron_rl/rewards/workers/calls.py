"""Calls and their items, as both reward runners keep them.

Invariants: every item gets one score, the first; a call's future ends when its last item has one. All of this is
touched by the runner's own thread only, except the future.
"""

import concurrent.futures
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import RewardError

RewardItem = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
"""(response, answer), or (response, answer, row fields)."""


@dataclass
class Call:
    """One call of score_many."""

    scores: list[Score | None]
    future: concurrent.futures.Future[list[Score]]
    num_open: int


@dataclass(eq=False)
class Item:
    call: Call
    index: int
    payload: tuple[str, str, dict[str, Any]]
    num_crashes: int = 0
    done: bool = False

    def finish(self, score: Score) -> None:
        """The first score counts; an item given to two workers may get a second one."""
        if self.done:
            return
        self.done = True
        self.call.scores[self.index] = score
        self.call.num_open -= 1
        if self.call.num_open == 0:
            try:
                self.call.future.set_result(self.call.scores)
            except concurrent.futures.InvalidStateError:
                pass  # the caller has cancelled it meanwhile

    @property
    def wanted(self) -> bool:
        return not self.done and not self.call.future.done()


def open_call(items: Sequence[RewardItem]) -> tuple[concurrent.futures.Future[list[Score]], list[Item]]:
    """The future of a call and what has to be scored for it; RewardError for an item that is not (response, answer)."""
    payloads = [_check_item(index, item) for index, item in enumerate(items)]
    future: concurrent.futures.Future[list[Score]] = concurrent.futures.Future()
    if not payloads:
        future.set_result([])
    call = Call([None] * len(payloads), future, len(payloads))
    return future, [Item(call, index, payload) for index, payload in enumerate(payloads)]


def _check_item(index: int, item: RewardItem) -> tuple[str, str, dict[str, Any]]:
    response, answer, *rest = item
    if not isinstance(response, str) or not isinstance(answer, str):
        raise RewardError(
            f"item {index}: expected (response, answer) as text, "
            f"got ({type(response).__name__}, {type(answer).__name__})"
        )
    return response, answer, dict(rest[0]) if rest else {}
