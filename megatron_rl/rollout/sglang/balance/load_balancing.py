"""What waits at each server and what it holds, in tokens; which server a request goes to, and when. Sends nothing.

A request counts with the tokens that it may come to hold: its context and what it is expected to generate (``OutputLengthEstimate``).
Laws: requests of one group go to one server, and a response returns to the server that had it, unless that server holds
much more than the least loaded one; a server is sent no more than its KV cache holds (``ServerQueue.next_batch``), so that it
need not take a cache back from a running request and compute it again; a server that has room takes what waits for a full
one (``steal_group``).
"""

import asyncio
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.rollout.requests import Generation, GenerationRequest, RetryableRequestError

_TOGETHER, _RETURNS = 16, 2
"""A request goes where its prefix is, although that server holds so many times its tokens more than the least loaded one: where
the prefix was computed with the same weights (16: the usual group stays whole), and where only the response was there before."""
_MUCH_MORE = 1.1
"""And in any case where that server holds at most this many times what the least loaded one holds."""
_FILLED = 0.95
"""Of a KV cache: expectations are means."""
_NUM_HOMES = 1 << 17
_NUM_SAMPLES = 4096


class _GeneratedShare:
    """How much of what requests may generate they do generate, over the newest ones."""

    def __init__(self) -> None:
        self._samples: dict[str, list[int]] = {}
        """By request: what it may generate, and what it counts as."""
        self._most = self._counted = 0

    def share(self) -> float:
        return self._counted / self._most if self._most else 1.0

    def sent(self, rid: str, most: int) -> None:
        self.forget(rid)
        self._samples[rid] = [most, most]
        self._most += most
        self._counted += most
        if len(self._samples) > _NUM_SAMPLES:
            self.forget(next(iter(self._samples)))

    def answered(self, rid: str, num_new: int) -> None:
        if sample := self._samples.get(rid):
            self._counted += num_new - sample[1]
            sample[1] = num_new

    def forget(self, rid: str) -> None:
        if sample := self._samples.pop(rid, None):
            self._most -= sample[0]
            self._counted -= sample[1]


class OutputLengthEstimate:
    """How many tokens a request is expected to generate: the mean of the newest ones that might generate about as many.

    A request in progress counts as all that it may generate: short ones answer first, and would promise too little. So at
    first every request does.
    """

    def __init__(self) -> None:
        self._by_size: defaultdict[int, _GeneratedShare] = defaultdict(_GeneratedShare)
        """By powers of two: whole responses end otherwise than windows."""

    def expected(self, most: int) -> int:
        return math.ceil(self._of(most).share() * most)

    def sent(self, rid: str, most: int) -> None:
        self._of(most).sent(rid, most)

    def ended(self, rid: str, most: int, outcome: Generation | Exception) -> None:
        """One that failed or was cut short says nothing."""
        if isinstance(outcome, Exception) or outcome.finish_reason == "abort":
            self._of(most).forget(rid)
        else:
            self._of(most).answered(rid, len(outcome.token_ids))

    def _of(self, most: int) -> _GeneratedShare:
        return self._by_size[most.bit_length()]


@dataclass
class PendingRequest:
    """A request that waits for its answer from one server."""

    request: GenerationRequest
    rid: str
    answer: asyncio.Future[Generation]
    alone: bool = False
    tokens: int = 0
    """That it is expected to hold at its end."""
    url: str = ""
    """Of the server that it waits for, or was sent to."""
    names: Mapping[Hashable, int] = field(default_factory=dict)
    """Of what it shares a prefix with, first what it shares most with: by how many times its tokens its server may hold more."""
    group: Hashable = None
    """Requests of one group change their server together."""
    refused: frozenset[str] = frozenset()
    """Servers at which it has failed."""


@dataclass
class ServerQueue:
    """One server, as its client sees it."""

    url: str
    live: bool = True
    leaving: bool = False
    """It is to get no further request."""
    capacity: int | None = None
    """Tokens that its KV cache holds. 0: it does not say; None: it was not asked yet."""
    says_load: bool = False
    """It says what it does, so that progress can be told from silence."""
    num_inflight: int = 0
    held: int = 0
    """Tokens of the requests in progress, as expected at their end."""
    queued: int = 0
    """The same of those that wait."""
    waiting: deque[PendingRequest] = field(default_factory=deque)
    sent: dict[str, PendingRequest] = field(default_factory=dict)
    """Requests in progress, by the id they were sent with."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Its HTTP requests in progress."""
    watch: asyncio.Task[None] | None = None
    sign_of_life_at: float = 0.0
    """When it last answered, or was idle."""
    num_bad: int = 0
    """Bad answers on end."""
    num_good: int = 0
    """Answers since it was last restored."""
    flush_scheduled: bool = False

    @property
    def is_candidate(self) -> bool:
        return self.live and not self.leaving

    @property
    def load(self) -> int:
        return self.held + self.queued

    def push(self, pending: PendingRequest) -> None:
        pending.url = self.url
        self.waiting.append(pending)
        self.queued += pending.tokens

    def pop(self, *, newest: bool = False) -> PendingRequest:
        pending = self.waiting.pop() if newest else self.waiting.popleft()
        self.queued -= pending.tokens
        return pending

    def drain(self) -> list[PendingRequest]:
        """All that wait."""
        return [self.pop() for _ in range(len(self.waiting))]

    def fail(self, requests: Iterable[PendingRequest], reason: str) -> None:
        """These go to another server at their next attempt."""
        for pending in requests:
            if not pending.answer.done():
                pending.answer.set_exception(RetryableRequestError(f"{self.url}: {reason}"))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def has_room(self, pending: PendingRequest) -> bool:
        """Its KV cache holds the request besides those in progress; a request that is alone there always goes."""
        return not self.capacity or not self.held or self.held + pending.tokens <= _FILLED * self.capacity

    def next_batch(self, max_batch_size: int, max_inflight: int) -> list[PendingRequest]:
        """What is to be sent next, in one HTTP request, and counts as in progress from here on; may be nothing."""
        batch: list[PendingRequest] = []
        while self.waiting and len(batch) < max_batch_size and self.num_inflight < max_inflight:
            pending = self.waiting[0]
            if pending.answer.done():  # its caller may have been cancelled
                self.pop()
                continue
            # A sample comes back with the slowest of its batch: one that is wanted alone neither joins nor leads one.
            if (batch and (pending.alone or batch[0].alone)) or not self.has_room(pending):
                break
            batch.append(self.pop())
            self.num_inflight += 1
            self.held += pending.tokens
        return batch

    def ended(self, batch: Iterable[PendingRequest]) -> None:
        """These are no longer in progress."""
        for pending in batch:
            self.num_inflight -= 1
            self.held -= pending.tokens


class PrefixAffinity:
    """Which server has the beginning of which response or group; the newest ones."""

    def __init__(self) -> None:
        self._urls: OrderedDict[Hashable, str] = OrderedDict()

    def of(self, pending: PendingRequest) -> tuple[str, int]:
        """Of the first of its names that has one, and how many times its tokens it is worth; else empty."""
        return next(((self._urls[name], worth) for name, worth in pending.names.items() if name in self._urls), ("", 0))

    def note(self, pending: PendingRequest) -> None:
        for name in pending.names:
            self._urls[name] = pending.url
            self._urls.move_to_end(name)
        while len(self._urls) > _NUM_HOMES:
            self._urls.popitem(last=False)


def candidates(servers: Iterable[ServerQueue], failed_urls: Sequence[str]) -> list[ServerQueue]:
    """Those to try next: that have not failed if there are any, else all but the last one; none if all are lost."""
    live = [server for server in servers if server.is_candidate]
    fresh = [server for server in live if server.url not in failed_urls]
    # Where only the one that failed is left it is asked again: it lives, and may have been busy.
    return fresh or [server for server in live if server.url not in failed_urls[-1:]] or live


def affinity_keys(request: GenerationRequest, sticky_key: Hashable | None) -> dict[Hashable, int]:
    """``PendingRequest.names``."""
    if sticky_key is not None:
        return {sticky_key: _TOGETHER}
    # New weights empty the prefix caches.
    version, response, group = request.weight_version, request.response_name, request.group_name
    names: dict[Hashable, int] = {("response", response, version): _TOGETHER} if response else {}
    names |= {("group", group, version): _TOGETHER} if group else {}
    return names | ({("response", response): _RETURNS} if response else {})


def choose(servers: Sequence[ServerQueue], pending: PendingRequest, homes: PrefixAffinity) -> ServerQueue:
    """The one that has most of the request's prefix, unless it holds much more than the least loaded one."""
    largest = max(server.capacity or 0 for server in servers)

    def load(server: ServerQueue) -> float:
        # Twice the KV cache takes twice the tokens; servers that do not say count as equal.
        return server.load * largest / server.capacity if server.capacity else server.load

    home, worth = homes.of(pending)
    least = min(servers, key=load)
    at_home = next((server for server in servers if server.url == home), least)
    return at_home if load(at_home) <= max(_MUCH_MORE * load(least), load(least) + worth * pending.tokens) else least


def steal_group(server: ServerQueue, others: Iterable[ServerQueue], homes: PrefixAffinity) -> bool:
    """Move the newest requests that wait at a full server, all of one group, to ``server``; False where it has no room."""
    full = [
        other
        for other in others
        # One that is about to send keeps what it has.
        if other is not server and other.live and other.waiting and not other.flush_scheduled
        if server.url not in other.waiting[-1].refused and server.has_room(other.waiting[-1])
    ]
    if not full or not server.is_candidate:
        return False
    giver = max(full, key=lambda other: other.queued)
    moved = [giver.pop(newest=True)]
    while giver.waiting and giver.waiting[-1].group == moved[0].group is not None:
        moved.append(giver.pop(newest=True))
    for pending in reversed(moved):
        server.push(pending)
        homes.note(pending)
    return True
