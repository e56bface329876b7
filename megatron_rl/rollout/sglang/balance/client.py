"""Asyncio client of SGLang's HTTP API: token ids in, token ids and log-probs out.

``generate`` waits until a server has capacity (at most ``max_inflight_requests`` are in progress at each server,
and no more tokens than its KV cache can store: ``load_balancing.py``), then for the reply, until the server has
made no progress for ``request_timeout_s``. A failed attempt or an invalid reply is retried at most ``max_retries``
times, on another running server if there is one. A busy server (429, 503) is retried for at most a request's
timeout.

Short requests that arrive within ``_TICK_S`` share one HTTP request of up to ``max_batch_size`` samples, which
saves a third of the CPU time for small models. Long samples, and samples sent with ``alone``, are not batched.

A server is *lost* when its machine does not answer, when it shows no sign of progress for ``hang_timeout_s``
(``liveness.py``), or after ``_MAX_BAD_ANSWERS`` consecutive invalid replies. A lost server gets no request until
``restore`` is called, because a restarted server has old weights until a publish. If no server is left,
``generate`` raises ``ServerLost``.

Invariants: every attempt has its own request id, and no id is a prefix of another (SGLang aborts all ids that start
with the given one). The tokens of an aborted request are returned, not dropped. Every reply has been validated
(``wire.parse_generation``). A client belongs to one event loop; its calls may be made, and their replies parsed, in
other processes (``caller``).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Self

from megatron_rl.config.derived import answer_timeout_s
from megatron_rl.rollout.requests import (
    NOTHING_GENERATED,
    BatchCall,
    BatchCaller,
    BatchReply,
    Generation,
    GenerationRequest,
    RequestRejected,
    RetryableRequestError,
    ServerBusy,
    ServerLost,
    WorkerLost,
)
from megatron_rl.rollout.sglang.balance.load_balancing import (
    OutputLengthEstimate,
    PendingRequest,
    PrefixAffinity,
    ServerQueue,
    candidates,
    choose,
    pending_request,
    steal_group,
)
from megatron_rl.rollout.sglang.process import liveness
from megatron_rl.rollout.sglang.wire.batch_call import exchange
from megatron_rl.rollout.sglang.wire.protocol import BUSY_STATUSES, sent_rid, validate
from megatron_rl.rollout.sglang.wire.response_validation import ApiKeyRejected, InvalidReply
from megatron_rl.system.http.json_http import ApiKey, HttpError, HttpSession, NoHttpReply, bearer

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 60.0
"""Timeout of a liveness probe after a failure, if hang_timeout_s is 0."""
_MAX_BAD_ANSWERS = 3
"""Consecutive invalid replies after which a server is lost; fewer may be accidents."""
_MAX_PAUSE_S = 30.0
"""Longest wait before a busy server is retried, regardless of its Retry-After."""
_MAX_UNANSWERED = 10.0
"""A server that reports progress but replies to no request is waited for this many times the usual timeout."""
_TICK_S = 0.002
_AGAIN, _ALONE = "#again", "#alone"
"""Suffixes for the id of a request that is resent within one attempt."""
_MAX_AGAIN = 10
"""Maximum number of workers lost by one request, because the request itself may crash them."""
_ABORT_TIMEOUT_S = 60.0
_ABORT_REPEAT_S = 0.5
"""Interval after which an abort that overtook its request is resent."""
_MAX_ABORTS_AT_ONCE = 64
"""Maximum number of concurrent abort calls per server; each is a small HTTP request."""


class SglangClient:
    """Sends requests to all ``urls``. An async context manager; ``close`` cancels requests in progress."""

    max_batch_size = 32  # samples per HTTP request
    needs_adapter = False  # True refuses requests that would run the model without its adapters
    first_pause_s = 0.5  # before the first retry at the same server; each later pause is twice as long

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocab_size: int,
        max_inflight_requests: int = 512,
        request_timeout_s: float = 0.0,
        max_retries: int = 3,
        hang_timeout_s: float = 120.0,
        api_key: str = "",
        on_server_lost: Callable[[str, str], None] | None = None,
    ) -> None:
        """Timeouts of 0: derived from a request's tokens; no hang detection. ``on_server_lost(url, reason)``: called at each loss."""
        if not urls:
            raise ValueError("the client needs the URL of at least one server")
        self.vocab_size = vocab_size
        self.max_inflight_requests = max_inflight_requests
        self.request_timeout_s = request_timeout_s
        self.max_retries = max_retries
        self.hang_timeout_s = hang_timeout_s
        self._api_key = api_key
        self._on_server_lost = on_server_lost
        self._servers = {url.rstrip("/"): ServerQueue(url.rstrip("/")) for url in urls}
        self._homes, self._new_tokens = PrefixAffinity(), OutputLengthEstimate()
        self._http = HttpSession()
        self.is_publishing = False  # True while the servers pause for new weights: silence is then no sign of a hang
        self.num_refused = 0  # requests that ended with RequestRejected
        self.caller: BatchCaller | None = None
        """Makes the HTTP calls in other processes (``WorkerPool``) and is closed with the client; None: in this process."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the requests in progress (the servers abort them) and close all connections."""
        for server in self._servers.values():
            for pending in server.drain():
                pending.answer.cancel()
        tasks = [task for server in self._servers.values() for task in (*server.tasks, server.watch) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.caller is not None:
            await self.caller.close()
        await self._http.close()

    @property
    def live_urls(self) -> list[str]:
        return [server.url for server in self._servers.values() if server.is_candidate]

    async def check(self) -> None:
        """Check which servers are gone, which idle clients would not notice."""
        live = [server for server in self._servers.values() if server.is_candidate]
        await asyncio.gather(*[self._diagnose(server, "it does not answer") for server in live])

    def restore(self, url: str) -> None:
        """Send requests again to a lost server that is back and has the current weights."""
        server = self._servers[url.rstrip("/")]
        server.live, server.leaving, server.capacity = True, False, None
        server.num_bad = server.num_good = 0

    def drop(self, url: str) -> None:
        """Send no more requests to a removed server."""
        self._servers[url].live = False

    def join(self, url: str) -> None:
        """Add a server, or one that has left, which gets requests once ``restore`` is called for it."""
        self._servers.setdefault(url, ServerQueue(url)).live = False

    async def leave(self, url: str, timeout_s: float = _ABORT_TIMEOUT_S) -> None:
        """Send a server no more requests; returns once none is in progress.

        Requests in progress return as ``abort`` with their tokens; waiting requests, and requests that do not
        return in time, are sent to other servers.
        """
        (server := self._servers[url]).leaving = True
        server.fail(server.drain(), "it leaves")
        deadline_s = time.monotonic() + timeout_s
        while server.live and server.sent and time.monotonic() < deadline_s:
            await self.abort({pending.request.rid for pending in server.sent.values()})
            if server.tasks:  # all of them may have ended meanwhile
                await asyncio.wait(server.tasks, timeout=_ABORT_REPEAT_S)
        server.live = False
        server.fail(server.sent.values(), "it has left")

    def has_served(self, url: str) -> bool:
        """True if the server has sent a valid reply since it was started or last restored."""
        return self._servers[url].num_good > 0

    async def generate(
        self, request: GenerationRequest, *, sticky_key: int | str | None = None, alone: bool = False
    ) -> Generation:
        """Generate one sample.

        Requests with the same ``sticky_key`` (default: the same ``response_name`` or ``group_name``) go to the same
        server while it runs and is not loaded much more than the others, so that a group shares its prefix cache;
        other requests go to the least loaded server. ``alone``: do not batch the request, for a caller that needs
        each sample as soon as it is complete. Raises RequestRejected, PromptMismatch, InvalidReply, ApiKeyRejected,
        ServerLost or WorkerFailed.
        """
        try:
            validate(request, self.vocab_size, needs_adapter=self.needs_adapter)
        except RequestRejected:
            self.num_refused += 1
            raise
        started_at = time.monotonic()
        failed_urls: list[str] = []
        failure: RetryableRequestError | InvalidReply = RetryableRequestError("it was lost before and not restored")
        num_busy = 0
        while len(failed_urls) - num_busy <= self.max_retries:
            servers = candidates(self._servers.values(), failed_urls)
            if servers and all(server.url in failed_urls for server in servers):
                await asyncio.sleep(self._pause_s(failure, len(failed_urls), self._timeout_s([request])))
                servers = candidates(self._servers.values(), failed_urls)
            if not servers:
                break
            num_new = self._new_tokens.expected(request.max_new_tokens)
            pending = pending_request(request, failed_urls, num_new, alone=alone, sticky_key=sticky_key)
            server = choose(servers, pending, self._homes)
            server.push(pending)
            self._homes.note(pending)
            self._schedule_flush(server)
            try:
                return await pending.answer
            except (RetryableRequestError, InvalidReply) as error:
                failure = error
            failed_urls.append(pending.url)
            logger.info("attempt %d of request %s failed: %s", len(failed_urls), request.rid, failure)
            # A busy reply is not a failure until a whole request's timeout has passed.
            waited_s = time.monotonic() - started_at
            num_busy += isinstance(failure, ServerBusy) and waited_s < self._timeout_s([request])
        if isinstance(failure, InvalidReply) and self.live_urls:
            raise failure
        lost_url = failed_urls[-1] if failed_urls else next(iter(self._servers))
        raise ServerLost(lost_url, time.monotonic() - started_at, len(failed_urls), str(failure))

    def _timeout_s(self, requests: Sequence[GenerationRequest]) -> float:
        return answer_timeout_s(self.request_timeout_s, max(request.max_new_tokens for request in requests))

    def _pause_s(self, failure: Exception, num_attempts: int, timeout_s: float) -> float:
        """Seconds to wait before a retry at the same server."""
        asked_s = failure.retry_after_s if isinstance(failure, ServerBusy) else None
        return min(_MAX_PAUSE_S, timeout_s, max(asked_s or 0.0, self.first_pause_s * 2.0 ** min(num_attempts - 1, 10)))

    async def abort(self, rids: Collection[str]) -> None:
        """End the requests ``rids`` now; unknown ids are ignored.

        Each request returns as ``abort`` with its tokens (none if it was never sent). A request that reaches the
        server at the same moment may escape: call again for requests that have not returned. If an abort call
        fails, the request ends by its own timeout.
        """
        limit = asyncio.Semaphore(_MAX_ABORTS_AT_ONCE)

        async def abort_one(server: ServerQueue, rid: str) -> None:
            async with limit:
                try:
                    await self._http.post(
                        server.url + "/abort_request", {"rid": rid}, timeout_s=_ABORT_TIMEOUT_S, headers=bearer(self._api_key)
                    )
                except HttpError as error:
                    logger.info("abort of %s at %s failed: %s", rid, server.url, error)

        for server in self._servers.values():
            for pending in server.waiting:
                if pending.request.rid in rids and not pending.answer.done():
                    pending.answer.set_result(NOTHING_GENERATED)
        sent = [(one, p) for one in self._servers.values() for p in one.sent.values() if p.request.rid in rids]
        for _, pending in sent:
            pending.abort_sent = True
        await asyncio.gather(*[abort_one(server, pending.rid) for server, pending in sent])

    def _schedule_flush(self, server: ServerQueue) -> None:
        if not server.flush_scheduled:
            server.flush_scheduled = True
            asyncio.get_running_loop().call_later(_TICK_S, self._flush, server)

    def _flush(self, server: ServerQueue) -> None:
        """Send the server's waiting requests in batches, up to its request limit and the capacity of its KV cache."""
        server.flush_scheduled = False
        if not server.live:
            return
        if server.capacity is None and server.waiting:
            server.flush_scheduled = True  # nothing is sent meanwhile
            server.start(self._query_capacity(server))
            return
        most = self.max_inflight_requests
        while server.waiting or (server.num_inflight < most and steal_group(server, self._servers.values(), self._homes)):
            was_idle = not server.num_inflight
            batch = server.next_batch(self.max_batch_size, most)
            if not batch:
                break
            if was_idle:
                server.sign_of_life_at = time.monotonic()
            for pending in batch:
                self._new_tokens.sent(pending.rid, pending.request.max_new_tokens)
            server.start(self._send(server, batch))
            self._watch(server)

    async def _query_capacity(self, server: ServerQueue) -> None:
        """Query the capacity of the server's KV cache, in tokens, before the first request."""
        try:
            server.capacity, server.says_load = await liveness.kv_tokens(self._http, server.url, api_key=self._api_key)
        finally:
            server.flush_scheduled = False
        self._flush(server)

    async def _send(self, server: ServerQueue, batch: list[PendingRequest]) -> None:
        """Send one HTTP request for the batch; every sample of it gets a result or an error."""
        server.sent.update({pending.rid: pending for pending in batch})
        outcomes: list[Generation | Exception] = [RetryableRequestError("the attempt was cancelled")] * len(batch)
        try:
            outcomes = await self._outcomes(server, batch)
        except asyncio.CancelledError:
            for pending in batch:
                pending.answer.cancel()
            raise
        except Exception as error:  # any failure must reach the callers, or they would wait forever
            outcomes = [error] * len(batch)
        finally:
            server.ended(batch)
            for pending, outcome in zip(batch, outcomes, strict=True):
                del server.sent[pending.rid]
                self._new_tokens.ended(pending.rid, pending.request.max_new_tokens, outcome)
            if any(one.waiting for one in self._servers.values()):
                self._schedule_flush(server)
        for pending, outcome in ((p, o) for p, o in zip(batch, outcomes, strict=True) if not p.answer.done()):
            self.num_refused += isinstance(outcome, RequestRejected)
            if isinstance(outcome, Exception):
                pending.answer.set_exception(outcome)
            else:
                pending.answer.set_result(outcome)

    async def _outcomes(self, server: ServerQueue, batch: list[PendingRequest]) -> list[Generation | Exception]:
        try:
            reply = await self._reply(server, batch)
        except WorkerLost:
            if batch[0].rid.count(_AGAIN) == _MAX_AGAIN:
                raise
            return await self._send_again(server, [batch], _AGAIN)
        except NoHttpReply as error:
            return [await self._diagnose(server, str(error))] * len(batch)
        except (HttpError, InvalidReply) as error:
            return [self._bad(server, str(error))] * len(batch)
        server.replied_at = server.sign_of_life_at = time.monotonic()
        if reply.status == 400 and len(batch) > 1:
            # SGLang rejects the whole batch for one invalid sample: resend them one by one to find it.
            return await self._send_again(server, [[pending] for pending in batch], _ALONE)
        if reply.status != 200:
            return [await self._refused(server, reply, batch[0].request.rid)] * len(batch)
        return [self._outcome(server, *of_sample) for of_sample in zip(batch, reply.samples, strict=True)]

    async def _reply(self, server: ServerQueue, batch: list[PendingRequest]) -> BatchReply:
        """Wait for the reply while the server makes progress. Raises NoHttpReply after a timeout without progress."""
        requests = [pending.request for pending in batch]
        limit_s = self._timeout_s(requests)
        # A server could report progress forever.
        most_s, sent_at = _MAX_UNANSWERED * max(limit_s, answer_timeout_s(0.0, requests[0].max_new_tokens)), time.monotonic()
        if server.says_load and not self.request_timeout_s:  # a long window is no longer silent
            limit_s = answer_timeout_s(0.0, 0)

        async def progress() -> Any:
            if not server.says_load:
                return server.num_good
            if time.monotonic() - max(sent_at, server.replied_at) > most_s:
                return None
            return await liveness.progress_between(self._http, server.url, api_key=self._api_key)

        rids = [pending.rid for pending in batch]
        call = BatchCall(server.url, requests, rids, None, self.vocab_size, ApiKey(self._api_key))
        reply = self.caller.call(call) if self.caller is not None else exchange(self._http, call)
        return await liveness.wait_while_progressing(reply, server.num_good, progress, limit_s)

    async def _send_again(
        self, server: ServerQueue, batches: list[list[PendingRequest]], mark: str
    ) -> list[Generation | Exception]:
        """Resend the batches under new ids, because SGLang may have started some of the old ids. Returns all results."""
        batches = [[replace(p, rid=sent_rid(p.rid[:-1] + mark)) for p in batch] for batch in batches]
        sent = {pending.rid: pending for batch in batches for pending in batch}
        server.sent.update(sent)
        try:
            outcomes = await asyncio.gather(*[self._outcomes(server, batch) for batch in batches])
        finally:
            for rid in sent:
                del server.sent[rid]
        return [outcome for batch in outcomes for outcome in batch]

    async def _refused(self, server: ServerQueue, reply: BatchReply, rid: str) -> Exception:
        if reply.status == 400:
            return RequestRejected(f"server {server.url} refused request {rid!r}: {reply.text}")
        if reply.status in (401, 403):
            return ApiKeyRejected(server.url, reply.status, has_key=bool(self._api_key))
        failed = await self._diagnose(server, f"it answered {reply.status}: {reply.text}")
        if reply.status in BUSY_STATUSES and server.live:
            return ServerBusy(str(failed), reply.retry_after_s)
        return failed

    def _outcome(
        self, server: ServerQueue, pending: PendingRequest, sample: Generation | Exception
    ) -> Generation | Exception:
        if isinstance(sample, InvalidReply):
            return self._bad(server, str(sample), type(sample))
        # The caller would resend the request at once, and without end if the server did the same again.
        if isinstance(sample, Generation) and not (len(sample.token_ids) or pending.abort_sent):
            return self._bad(server, f"it aborted request {pending.request.rid!r} without a token, although no abort was sent")
        if not isinstance(sample, Exception):
            server.num_bad = 0
            server.num_good += 1
        return sample

    def _bad(self, server: ServerQueue, reason: str, kind: type[InvalidReply] = InvalidReply) -> InvalidReply:
        """Error for an invalid reply; too many consecutive ones mark the server as lost."""
        error = kind(f"the SGLang server at {server.url} sent an invalid reply: {reason}")
        server.num_bad += kind.server_at_fault
        if server.num_bad >= _MAX_BAD_ANSWERS:
            self._mark_lost(server, f"{server.num_bad} consecutive invalid replies, the last one: {reason}")
        return error

    async def _diagnose(self, server: ServerQueue, reason: str) -> RetryableRequestError:
        """Check after a failure whether the server is gone, and mark it as lost if so."""
        # A timeout alone is not enough: the request may have queued after long ones.
        if server.live and not await self._probe(server):
            self._mark_lost(server, reason)
        return RetryableRequestError(f"{server.url}: {reason}")

    async def _probe(self, server: ServerQueue) -> bool:
        timeout_s = self.hang_timeout_s / 2 or _PROBE_TIMEOUT_S
        return await liveness.is_generating(self._http, server.url, api_key=self._api_key, timeout_s=timeout_s)

    def _watch(self, server: ServerQueue) -> None:
        if self.hang_timeout_s and (server.watch is None or server.watch.done()):
            server.watch = asyncio.get_running_loop().create_task(self._probe_until_idle(server))

    async def _probe_until_idle(self, server: ServerQueue) -> None:
        """While requests are in progress, probe the server once none has returned for half of ``hang_timeout_s``."""
        while server.live and server.num_inflight:
            if self.is_publishing:
                server.sign_of_life_at = time.monotonic()
            quiet_s = time.monotonic() - server.sign_of_life_at
            if quiet_s < self.hang_timeout_s / 2:
                await asyncio.sleep(self.hang_timeout_s / 2 - quiet_s)
            elif await self._probe(server):
                server.sign_of_life_at = time.monotonic()
            elif time.monotonic() - server.sign_of_life_at >= self.hang_timeout_s:
                self._mark_lost(server, f"the server hangs: no reply and no token for {self.hang_timeout_s:g} s")
            else:
                await asyncio.sleep(min(1.0, self.hang_timeout_s / 10))

    def _mark_lost(self, server: ServerQueue, reason: str) -> None:
        if not server.live:
            return
        logger.warning("SGLang server %s is lost: %s", server.url, reason)
        server.live = False
        # Its requests, sent or waiting, go to another server at their next attempt.
        server.fail([*server.drain(), *server.sent.values()], reason)
        for task in server.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._on_server_lost is not None and not server.leaving:
            self._on_server_lost(server.url, reason)
