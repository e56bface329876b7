"""Token ids in, token ids and log-probs out: the asyncio client of SGLang's HTTP API.

``generate`` waits for a free place at a server (at most ``max_inflight_requests`` are in progress at each), then at most
``request_timeout_s`` for the answer; a failed attempt is repeated at most ``max_retries`` times, on another live server
if there is one. Calls that arrive within ``_TICK_S`` travel in one HTTP request of up to ``max_batch_size`` samples,
which saves a third of the CPU time at small models. A sample comes back with the slowest of its batch; one that was
asked for ``alone`` comes back at once.

A server that no longer answers is *lost*: it gets no request until ``restore`` names it, because a restarted server
holds old weights until somebody sends it new ones. With no server left, ``generate`` raises ``ServerLost``.

Invariants: every attempt has a request id of its own, and none is the beginning of another (SGLang aborts all that begin
with the id given); what an aborted request had generated is returned, not dropped.
One client belongs to one event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import orjson

from megatron_rl.errors import UserError
from megatron_rl.rollout.sglang.wire import (
    NOTHING_GENERATED,
    AttemptFailed,
    BadAnswer,
    Generation,
    GenerationRequest,
    RequestRejected,
    generate_body,
    parse_generation,
    validate,
)
from megatron_rl.system.http import HttpError, HttpSession, NoAnswer, pauses_s

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 20.0
"""A server that does not answer /health for so long is lost; one that is gone refuses the connection at once."""
_TICK_S = 0.002
_ABORT_TIMEOUT_S = 60.0
_MAX_ABORTS_AT_ONCE = 64
"""Abort calls in progress at one server; each is a small HTTP request."""


class ServerLost(UserError, RuntimeError):
    """No live server answered. ``url`` is the last one tried, ``waited_s`` how long the caller waited in all."""

    def __init__(self, url: str, waited_s: float, num_attempts: int, reason: str) -> None:
        self.url = url
        self.waited_s = waited_s
        self.num_attempts = num_attempts
        self.reason = reason
        super().__init__(
            f"SGLang server {url} is lost: {reason}. The caller waited {waited_s:.1f} s over {num_attempts} "
            "attempt(s). Look at the server's log, restart it (SglangServer.restart), send it the current weights "
            "and name it to the client's restore(); if it is only slow, raise rollout.request_timeout_s."
        )


@dataclass
class _Pending:
    """A request that waits for its answer from one server."""

    request: GenerationRequest
    rid: str
    answer: asyncio.Future[Generation]
    alone: bool = False


@dataclass
class _ServerState:
    url: str
    live: bool = True
    num_inflight: int = 0
    waiting: deque[_Pending] = field(default_factory=deque)
    sent: dict[str, _Pending] = field(default_factory=dict)
    """Requests in progress, by the id they were sent with."""
    flush_scheduled: bool = False

    @property
    def load(self) -> int:
        return self.num_inflight + len(self.waiting)


class SglangClient:
    """Sends to all ``urls``. An async context manager; ``close`` ends what is in progress."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocab_size: int,
        max_inflight_requests: int = 512,
        request_timeout_s: float = 300.0,
        max_retries: int = 3,
        max_batch_size: int = 32,
        backoff_s: float = 0.5,
        on_server_lost: Callable[[str, str], None] | None = None,
    ) -> None:
        """``on_server_lost(url, reason)`` is called once each time a server is lost."""
        if not urls:
            raise ValueError("the client needs the URL of at least one server")
        self.vocab_size = vocab_size
        self.max_inflight_requests = max_inflight_requests
        self.request_timeout_s = request_timeout_s
        self.max_retries = max_retries
        self.max_batch_size = max_batch_size
        self.backoff_s = backoff_s
        self._on_server_lost = on_server_lost
        self._servers = {url.rstrip("/"): _ServerState(url.rstrip("/")) for url in urls}
        self._http = HttpSession()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the requests in progress (the servers abort them) and close all connections."""
        for server in self._servers.values():
            while server.waiting:
                server.waiting.popleft().answer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    @property
    def live_urls(self) -> list[str]:
        return [server.url for server in self._servers.values() if server.live]

    def restore(self, url: str) -> None:
        """A lost server is back and has the current weights: send it requests again."""
        self._servers[url.rstrip("/")].live = True

    async def generate(
        self, request: GenerationRequest, *, sticky_key: int | str | None = None, alone: bool = False
    ) -> Generation:
        """Generate one sample.

        Requests with the same ``sticky_key`` go to the same server while it lives, so that a group shares its prefix
        cache; without a key the least loaded server is taken. ``alone``: it is not batched, for a caller that wants
        each sample as soon as it is complete. Raises RequestRejected, BadAnswer or ServerLost.
        """
        validate(request, self.vocab_size)
        started_at = time.monotonic()
        failed_url, reason = "", "it was lost before and not restored"
        for attempt, pause_s in enumerate((0.0, *pauses_s(self.max_retries, self.backoff_s))):
            server = self._choose(sticky_key, failed_url)
            if server is None:
                lost_url = failed_url or next(iter(self._servers))
                raise ServerLost(lost_url, time.monotonic() - started_at, attempt, reason)
            if server.url == failed_url:
                await asyncio.sleep(pause_s)
            try:
                return await self._attempt(server, request, attempt, alone)
            except AttemptFailed as error:
                failed_url, reason = server.url, str(error)
                logger.info("attempt %d of request %s failed: %s", attempt + 1, request.rid, reason)
        raise ServerLost(failed_url, time.monotonic() - started_at, self.max_retries + 1, reason)

    async def abort(self, rids: Collection[str]) -> None:
        """End the requests ``rids`` now; other ids are passed over.

        Each comes back as ``abort`` with the tokens it has (none if it was never sent). A request that reaches the
        server at the same moment may escape: call again for what has not come back. A server that does not take the
        call is left alone; its requests end by their own time limit.
        """
        limit = asyncio.Semaphore(_MAX_ABORTS_AT_ONCE)

        async def abort_one(server: _ServerState, rid: str) -> None:
            async with limit:
                try:
                    await self._http.post(server.url + "/abort_request", {"rid": rid}, timeout_s=_ABORT_TIMEOUT_S)
                except HttpError as error:
                    logger.info("abort of %s at %s failed: %s", rid, server.url, error)

        for server in self._servers.values():
            for pending in server.waiting:
                if pending.request.rid in rids and not pending.answer.done():
                    pending.answer.set_result(NOTHING_GENERATED)
        sent = [
            (server, rid)
            for server in self._servers.values()
            for rid, p in server.sent.items()
            if p.request.rid in rids
        ]
        await asyncio.gather(*[abort_one(server, rid) for server, rid in sent])

    def _choose(self, sticky_key: int | str | None, failed_url: str) -> _ServerState | None:
        """The server to try next: another one than the last time if there is one, None if all are lost."""
        live = [server for server in self._servers.values() if server.live]
        # Where only the one that failed is left it is asked again: it lives, and may have been busy.
        candidates = [server for server in live if server.url != failed_url] or live
        if not candidates:
            return None
        if sticky_key is not None:
            return candidates[hash(sticky_key) % len(candidates)]
        return min(candidates, key=lambda server: server.load)

    async def _attempt(self, server: _ServerState, request: GenerationRequest, attempt: int, alone: bool) -> Generation:
        # The server may still hold the request of an attempt whose connection broke, and refuses an id twice.
        rid = _sent_rid(request.rid if attempt == 0 else f"{request.rid}#{attempt}")
        pending = _Pending(request, rid, asyncio.get_running_loop().create_future(), alone)
        server.waiting.append(pending)
        self._schedule_flush(server)
        return await pending.answer

    def _schedule_flush(self, server: _ServerState) -> None:
        if server.waiting and not server.flush_scheduled:
            server.flush_scheduled = True
            asyncio.get_running_loop().call_later(_TICK_S, self._flush, server)

    def _flush(self, server: _ServerState) -> None:
        """Send what waits for the server, in batches, as far as places are free."""
        server.flush_scheduled = False
        while server.waiting and server.num_inflight < self.max_inflight_requests:
            room = min(self.max_batch_size, self.max_inflight_requests - server.num_inflight)
            batch: list[_Pending] = []
            while server.waiting and len(batch) < room:
                # A sample comes back with the slowest of its batch: one that is wanted alone neither joins nor leads one.
                if batch and (server.waiting[0].alone or batch[0].alone):
                    break
                pending = server.waiting.popleft()
                if not pending.answer.done():  # its caller may have been cancelled
                    batch.append(pending)
            if batch:
                server.num_inflight += len(batch)
                self._run(self._send(server, batch))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, server: _ServerState, batch: list[_Pending]) -> None:
        """One HTTP request for the batch; every sample of it gets its answer or its error."""
        server.sent.update({pending.rid: pending for pending in batch})
        try:
            outcomes = await self._outcomes(server, batch)
        except asyncio.CancelledError:
            for pending in batch:
                pending.answer.cancel()
            raise
        except Exception as error:  # whatever went wrong, nobody may wait forever
            outcomes = [error] * len(batch)
        finally:
            server.num_inflight -= len(batch)
            for pending in batch:
                del server.sent[pending.rid]
            self._schedule_flush(server)
        for pending, outcome in zip(batch, outcomes, strict=True):
            if pending.answer.done():
                continue
            if isinstance(outcome, Exception):
                pending.answer.set_exception(outcome)
            else:
                pending.answer.set_result(outcome)

    async def _outcomes(self, server: _ServerState, batch: list[_Pending]) -> list[Generation | Exception]:
        requests = [pending.request for pending in batch]
        body = orjson.dumps(generate_body(requests, [pending.rid for pending in batch]))
        try:
            answer = await self._http.post(server.url + "/generate", body, timeout_s=self.request_timeout_s)
        except HttpError as error:
            return [await self._diagnose(server, _describe(error, self.request_timeout_s))] * len(batch)
        if answer.status == 400 and len(batch) > 1:
            # One sample is at fault, and SGLang refuses them all: find out which by sending each alone. New ids,
            # because SGLang may have begun with some of them.
            singles = [replace(pending, rid=_sent_rid(f"{pending.rid[:-1]}#alone")) for pending in batch]
            server.sent.update({single.rid: single for single in singles})
            try:
                outcomes = await asyncio.gather(*[self._outcomes(server, [single]) for single in singles])
            finally:
                for single in singles:
                    del server.sent[single.rid]
            return [outcome for (outcome,) in outcomes]
        if answer.status == 400:
            return [RequestRejected(f"server {server.url} refused request {requests[0].rid!r}: {answer.text[:500]}")]
        if answer.status != 200:
            return [await self._diagnose(server, f"it answered {answer.status}: {answer.text[:500]}")] * len(batch)
        samples = orjson.loads(answer.content)
        return [_outcome(request, sample) for request, sample in zip(requests, samples, strict=True)]

    async def _diagnose(self, server: _ServerState, reason: str) -> AttemptFailed:
        """After a failure: is the server gone? Marks it as lost then."""
        # A time-out alone says little: the request may have queued behind long ones.
        try:
            healthy = (await self._http.get(server.url + "/health", timeout_s=_PROBE_TIMEOUT_S)).status == 200
        except HttpError:
            healthy = False
        if not healthy:
            self._mark_lost(server, reason)
        return AttemptFailed(f"{server.url}: {reason}")

    def _mark_lost(self, server: _ServerState, reason: str) -> None:
        if not server.live:
            return
        server.live = False
        logger.warning("SGLang server %s is lost: %s", server.url, reason)
        # What was not sent yet goes to the next server at its next attempt.
        while server.waiting:
            pending = server.waiting.popleft()
            if not pending.answer.done():
                pending.answer.set_exception(AttemptFailed(f"{server.url}: {reason}"))
        if self._on_server_lost is not None:
            self._on_server_lost(server.url, reason)


def _sent_rid(rid: str) -> str:
    """The id with an end mark: "r-1" would otherwise begin "r-10"."""
    return f"{rid};"


def _outcome(request: GenerationRequest, answer: dict[str, Any]) -> Generation | Exception:
    try:
        return parse_generation(request, answer)
    except (RequestRejected, BadAnswer, AttemptFailed) as error:
        return error


def _describe(error: HttpError, timeout_s: float) -> str:
    if isinstance(error, NoAnswer) and error.timed_out:
        return f"no answer within {timeout_s:.0f} s"
    return str(error)
