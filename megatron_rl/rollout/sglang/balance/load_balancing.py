"""Balances requests over servers by tokens: queue lengths, expected output and prefix affinity. Pure; the client
does the sending.

A request counts with the tokens that it may occupy: its context plus its expected output
(``OutputLengthEstimate``). Invariants: requests of one group go to one server, and a response returns to its
previous server, unless that server is loaded much more than the least loaded one. A server is sent no more tokens
than its KV cache can store (``ServerQueue.next_batch``), so that it need not evict and recompute a running request.
A server with free capacity takes requests that wait for a full one (``steal_group``).
"""

import asyncio
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.rollout.requests import Generation, GenerationRequest, RetryableRequestError
from megatron_rl.rollout.sglang.wire.protocol import sent_rid

_TOGETHER, _RETURNS = 16, 2
"""A request follows its cached prefix while that server's excess load is below this multiple of the request's
tokens: 16 if the prefix was computed with the same weights (so a usual group stays whole), 2 if only earlier parts
of the response were generated there."""
_MUCH_MORE = 1.1
"""In any case a request follows its prefix to a server with at most this multiple of the least load."""
_FILLED = 0.95
"""Usable fraction of a KV cache, because expectations are means."""
_MOST_BATCHED_TOKENS = 128
"""Samples of more tokens are not batched, because a batch returns with its slowest sample."""
_NUM_HOMES = 1 << 17
_NUM_SAMPLES = 4096


class _GeneratedShare:
    """Ratio of generated tokens to the allowed maximum, over the most recent requests."""

    def __init__(self) -> None:
        self._samples: dict[str, list[int]] = {}
        """Maps request id to [allowed tokens, counted tokens]."""
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
    """Expected number of new tokens of a request: the mean over recent requests with a similar limit.

    A request in progress counts with its full limit, because short responses end first and would bias the mean.
    Initially every request therefore counts with its limit.
    """

    def __init__(self) -> None:
        self._by_size: defaultdict[int, _GeneratedShare] = defaultdict(_GeneratedShare)
        """Keyed by the limit's bit length: whole responses end differently from windows."""

    def expected(self, most: int) -> int:
        return math.ceil(self._of(most).share() * most)

    def sent(self, rid: str, most: int) -> None:
        self._of(most).sent(rid, most)

    def ended(self, rid: str, most: int, outcome: Generation | Exception) -> None:
        """Record the result of a request; failed and aborted requests are ignored."""
        if isinstance(outcome, Exception) or outcome.finish_reason == "abort":
            self._of(most).forget(rid)
        else:
            self._of(most).answered(rid, len(outcome.token_ids))

    def _of(self, most: int) -> _GeneratedShare:
        return self._by_size[most.bit_length()]


@dataclass
class PendingRequest:
    """A request that waits for its reply from one server."""

    request: GenerationRequest
    rid: str
    answer: asyncio.Future[Generation]
    alone: bool = False
    tokens: int = 0
    """Tokens that the request is expected to occupy at its end."""
    url: str = ""
    """URL of the server that the request waits for or was sent to."""
    names: Mapping[Hashable, int] = field(default_factory=dict)
    """Maps names of shared prefixes, longest first, to the excess load, in multiples of ``tokens``, at which the
    request still follows the prefix."""
    group: Hashable = None
    """Requests of one group move to another server together."""
    refused: frozenset[str] = frozenset()
    """URLs of servers at which the request has failed."""
    abort_sent: bool = False
    """True once an abort of the request was sent."""


@dataclass
class ServerQueue:
    """A server's state as seen by its client."""

    url: str
    live: bool = True
    leaving: bool = False
    """True if the server must get no more requests."""
    capacity: int | None = None
    """Capacity of the KV cache in tokens. 0: not reported; None: not queried yet."""
    says_load: bool = False
    """True if the server reports its load, so that progress can be distinguished from silence."""
    num_inflight: int = 0
    held: int = 0
    """Expected final tokens of the requests in progress."""
    queued: int = 0
    """Expected final tokens of the waiting requests."""
    waiting: deque[PendingRequest] = field(default_factory=deque)
    sent: dict[str, PendingRequest] = field(default_factory=dict)
    """Requests in progress, keyed by the id they were sent with."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """HTTP requests in progress."""
    watch: asyncio.Task[None] | None = None
    sign_of_life_at: float = 0.0
    """Time (monotonic) of the last reply or generated probe token, or of the end of the last idle period."""
    replied_at: float = 0.0
    """Time (monotonic) of the last reply to a request."""
    num_bad: int = 0
    """Number of consecutive invalid replies."""
    num_good: int = 0
    """Number of valid replies since the server was last restored."""
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
        """Remove and return all waiting requests."""
        return [self.pop() for _ in range(len(self.waiting))]

    def fail(self, requests: Iterable[PendingRequest], reason: str) -> None:
        """Fail ``requests`` with RetryableRequestError, on which the client retries each of them on another server."""
        for pending in requests:
            if not pending.answer.done():
                pending.answer.set_exception(RetryableRequestError(f"{self.url}: {reason}"))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def has_room(self, pending: PendingRequest) -> bool:
        """True if the KV cache can store the request next to those in progress; a request that would run alone
        always fits."""
        return not self.capacity or not self.held or self.held + pending.tokens <= _FILLED * self.capacity

    def next_batch(self, max_batch_size: int, max_inflight: int) -> list[PendingRequest]:
        """Take the next waiting requests for one HTTP request and count them as in progress; may be empty."""
        batch: list[PendingRequest] = []
        while self.waiting and len(batch) < max_batch_size and self.num_inflight < max_inflight:
            pending = self.waiting[0]
            if pending.answer.done():  # its caller may have been cancelled
                self.pop()
                continue
            # A sample returns with the slowest of its batch, so a sample sent alone neither joins nor starts a batch.
            if (batch and (pending.alone or batch[0].alone)) or not self.has_room(pending):
                break
            batch.append(self.pop())
            self.num_inflight += 1
            self.held += pending.tokens
        return batch

    def ended(self, batch: Iterable[PendingRequest]) -> None:
        """Count the batch as no longer in progress."""
        for pending in batch:
            self.num_inflight -= 1
            self.held -= pending.tokens


class PrefixAffinity:
    """Remembers which server has the prefix of which response or group, for the most recent ones."""

    def __init__(self) -> None:
        self._urls: OrderedDict[Hashable, str] = OrderedDict()

    def of(self, pending: PendingRequest) -> tuple[str, int]:
        """(URL, excess load) for the first known name of the request; ("", 0) if no name is known."""
        return next(((self._urls[name], worth) for name, worth in pending.names.items() if name in self._urls), ("", 0))

    def note(self, pending: PendingRequest) -> None:
        for name in pending.names:
            self._urls[name] = pending.url
            self._urls.move_to_end(name)
        while len(self._urls) > _NUM_HOMES:
            self._urls.popitem(last=False)


def candidates(servers: Iterable[ServerQueue], failed_urls: Sequence[str]) -> list[ServerQueue]:
    """Servers to try next: those that have not failed; otherwise all except the last tried; empty if all are lost."""
    live = [server for server in servers if server.is_candidate]
    fresh = [server for server in live if server.url not in failed_urls]
    # If only the failed server is left, retry it: it is running and may have been busy.
    return fresh or [server for server in live if server.url not in failed_urls[-1:]] or live


def affinity_keys(request: GenerationRequest, sticky_key: Hashable | None) -> dict[Hashable, int]:
    """Build ``PendingRequest.names`` for a request."""
    if sticky_key is not None:
        return {sticky_key: _TOGETHER}
    # New weights empty the prefix caches.
    version, response, group = request.weight_version, request.response_name, request.group_name
    names: dict[Hashable, int] = {("response", response, version): _TOGETHER} if response else {}
    names |= {("group", group, version): _TOGETHER} if group else {}
    return names | ({("response", response): _RETURNS} if response else {})


def pending_request(
    request: GenerationRequest,
    failed_urls: Sequence[str],
    num_new_tokens: int,
    *,
    alone: bool,
    sticky_key: Hashable | None,
) -> PendingRequest:
    """Attempt of a request that has failed at ``failed_urls``; ``num_new_tokens``: expected number of new tokens."""
    # The server may still run the request of a broken connection, and rejects a duplicate id.
    rid = sent_rid(f"{request.rid}#{len(failed_urls)}" if failed_urls else request.rid)
    return PendingRequest(
        request,
        rid,
        asyncio.get_running_loop().create_future(),
        alone=alone or request.max_new_tokens > _MOST_BATCHED_TOKENS,
        tokens=request.num_prompt_tokens + num_new_tokens,
        names=affinity_keys(request, sticky_key),
        group=sticky_key if sticky_key is not None else request.group_name or None,
        refused=frozenset(failed_urls),
    )


def choose(servers: Sequence[ServerQueue], pending: PendingRequest, homes: PrefixAffinity) -> ServerQueue:
    """Choose the server that last got the request's longest known prefix, unless its load is much above the least load."""
    largest = max(server.capacity or 0 for server in servers)

    def load(server: ServerQueue) -> float:
        # Load is relative to KV cache size; servers that do not report their size count as equal.
        return server.load * largest / server.capacity if server.capacity else server.load

    home, worth = homes.of(pending)
    least = min(servers, key=load)
    at_home = next((server for server in servers if server.url == home), least)
    return at_home if load(at_home) <= max(_MUCH_MORE * load(least), load(least) + worth * pending.tokens) else least


def steal_group(server: ServerQueue, others: Iterable[ServerQueue], homes: PrefixAffinity) -> bool:
    """Move the newest waiting requests of a full server, all of one group, to ``server``. Returns False if it has
    no capacity."""
    full = [
        other
        for other in others
        # A server that is about to send keeps its requests.
        if other is not server and other.live and other.waiting and not other.flush_scheduled
        if server.url not in other.waiting[-1].refused and server.has_room(other.waiting[-1])
    ]
    if not full or not server.is_candidate:
        return False
    giver = max(full, key=lambda other: other.queued)
    moved = [giver.pop(newest=True)]
    # The rest of the group follows, so that it still shares one prefix cache.
    while giver.waiting and giver.waiting[-1].group == moved[0].group is not None:
        moved.append(giver.pop(newest=True))
    for pending in reversed(moved):
        server.push(pending)
        homes.note(pending)
    return True
