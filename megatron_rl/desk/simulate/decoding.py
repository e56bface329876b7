"""Simulates the servers' seconds for a step's requests, by events: a request ends, another starts, or the KV cache is full. Pure.

The model follows SGLang's scheduler: requests start in order, in prefill passes that stop decoding and return each request's first
token; then every running request grows by one token per decode step. Between two events a decode step's time grows linearly with the
context, so intervals are summed in closed form.

Admission (srt/managers/schedule_policy.py, schedule_batch.py, scheduler.py): a server does not know lengths. A request starts if

    tokens + min(left, 4096) + 1 < cache - tokens of the running requests - ratio * sum over them of min(left, 4096)

with ``left`` its max_new_tokens minus its tokens so far, and without the ratio for requests of the same pass. After a request that
does not fit, none starts until one leaves. The ratio falls from 0.7 to 0.098 over 600 decode steps. If the cache cannot take another
token per running request, the requests with the fewest tokens return to the end of the queue, and are prefilled again later.

The client limits the requests before that: it sends no more than fit a share of the cache with their expected tokens, which is the
mean of recent requests (rollout/sglang/balance/load_balancing.py).
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from megatron_rl.desk.simulate.timing import Timing

# The names of SGLang's own variables follow their values (srt/environ.py, managers/schedule_policy.py).
_CLIPPED_TOKENS = 4096  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
_INITIAL_RATIO, _LEAST_SHARE = 0.7, 0.14  # SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR
_RATIO_STEPS = 600  # SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS
MOST_BATCHED_TOKENS = 128
"""The client sends a request that may get more new tokens alone."""
_RETRACT_STEPS = 20  # SGLANG_RETRACT_DECODE_STEPS
_NOT_RUNNING = -(2**40)


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server; 0 means unlimited."""

    running: int = 0
    """Requests that decode at the same time (SGLang's max-running-requests)."""
    kv_tokens: int = 0
    """Tokens that the KV cache holds (max-total-tokens)."""
    inflight: int = 0
    """Requests that the client has sent and that have no reply yet (rollout.max_inflight_requests)."""
    http_batch: int = 32
    """Short requests per HTTP request; each counts as in flight until the longest request of its batch ends."""
    prefill_tokens: int = 8192
    """Tokens of one prefill pass (chunked-prefill-size)."""
    conservativeness: float = 1.0
    """Factor of the initial ratio (schedule-conservativeness)."""
    sent_share: float = 0.95
    """Share of the KV cache that the client fills with expected tokens."""


@dataclass(frozen=True)
class ServerTrace:
    """The simulated progress of one server on its requests."""

    finish_s: np.ndarray
    """[requests] time in seconds of each request's last token."""
    begin_steps: np.ndarray
    """[requests] decode steps done before the request started to run; after a retraction, less the tokens that it had."""
    retractions: np.ndarray
    """[requests] number of times that a full cache stopped the request."""
    clock_s: np.ndarray
    """Times in seconds at which ``clock_steps`` decode steps were done, increasing."""
    clock_steps: np.ndarray
    context_token_steps: float
    """Tokens in the context, summed over decode steps."""

    @property
    def seconds(self) -> float:
        return float(self.clock_s[-1])

    def tokens_at(self, time_s: float, new: np.ndarray) -> np.ndarray:
        """Return [requests] the tokens of each at a moment, assuming decode steps of equal length between two events."""
        steps = np.interp(time_s, self.clock_s, self.clock_steps)
        begun = self.begin_steps <= steps
        made = np.where(begun, np.floor(1 + steps - self.begin_steps), 0).astype(np.int64)
        return np.where(self.finish_s <= time_s, new, np.minimum(made, np.maximum(new - 1, 0)))


@dataclass(frozen=True)
class ServerRequests:
    """Requests of one server in their order; [requests] each."""

    prefix: np.ndarray
    """Tokens to prefill."""
    new: np.ndarray
    """Tokens to generate."""
    room: np.ndarray
    """Tokens to generate at most (max_new_tokens); the server knows only these."""
    expected: np.ndarray
    """New tokens that the client expects."""

    def pick(self, chosen: np.ndarray) -> "ServerRequests":
        return ServerRequests(self.prefix[chosen], self.new[chosen], self.room[chosen], self.expected[chosen])


def serve(requests: ServerRequests, timing: Timing, limits: ServerLimits) -> ServerTrace:
    """Simulate one server. Requests without new tokens are not sent."""
    new = requests.new
    sent = np.flatnonzero(new > 0)
    work = requests.pick(sent)
    some = _served_at_once(work.prefix, work.new, timing) if _all_fit(work, limits) else _Queue(work, timing, limits).run()
    spread_out = np.zeros((3, len(new)))
    spread_out[:, sent] = some.finish_s, some.begin_steps, some.retractions
    finish_s, begin_steps, retractions = spread_out
    return ServerTrace(finish_s, begin_steps, retractions, some.clock_s, some.clock_steps, some.context_token_steps)


def spread(num_requests: int, num_servers: int) -> list[np.ndarray]:
    """Return the requests of each server: every request goes to the least loaded one, which is round-robin."""
    return [np.arange(server, num_requests, num_servers) for server in range(num_servers)]


def expected_tokens(new: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return [requests] the new tokens that the client expects: the mean share of ``room`` in requests of similar room."""
    sizes = np.frexp(room.astype(np.float64))[1]  # the bit length, as in OutputLengthEstimate
    share = np.bincount(sizes, new) / np.maximum(np.bincount(sizes, room), 1)
    return np.ceil(share[sizes] * room).astype(np.int64)


def _all_fit(work: ServerRequests, limits: ServerLimits) -> bool:
    """True if no limit delays or stops any of the requests."""
    if any(0 < limit < len(work.new) for limit in (limits.running, limits.inflight)):
        return False
    promised = int((work.prefix + np.maximum(work.new, np.minimum(work.room, _CLIPPED_TOKENS)) + 1).sum())
    sent = int((work.prefix + work.expected).sum())
    return not limits.kv_tokens or (promised < limits.kv_tokens and sent <= limits.sent_share * limits.kv_tokens)


def _prefill_s(prefix: np.ndarray, timing: Timing) -> np.ndarray:
    work = timing.prefill
    return work.row_s + work.token_s * prefix + work.square_s * prefix.astype(np.float64) ** 2


def _served_at_once(prefix: np.ndarray, new: np.ndarray, timing: Timing) -> ServerTrace:
    """Simulate requests that all run from the start: prefills first, then decode steps with a decreasing number of requests."""
    order = np.argsort(new, kind="stable")
    steps = new[order] - 1  # the first token comes with the prefill
    prefills_s = _prefill_s(prefix, timing)
    begin_s = float(prefills_s.sum())
    ends, first = np.unique(steps, return_index=True)
    running = (len(new) - first).astype(np.float64)
    span = np.diff(ends, prepend=0).astype(np.float64)
    # Context before each interval: prefixes and generated tokens of the requests that still run.
    left_prefix = np.cumsum(prefix[order][::-1])[::-1][first].astype(np.float64)
    made = 1.0 + np.concatenate([[0], ends[:-1]])
    context_steps = span * (left_prefix + running * made) + running * span * (span - 1) / 2
    decode = timing.decode
    seconds = span * decode.seconds(running) + decode.context_token_s * context_steps
    ends_s = begin_s + np.cumsum(seconds)
    finish_s = np.empty(len(new))
    finish_s[order] = ends_s[np.searchsorted(ends, steps)] if len(new) else ends_s
    finish_s = np.where(new == 1, np.cumsum(prefills_s), finish_s)
    return ServerTrace(
        finish_s,
        np.zeros(len(new)),
        np.zeros(len(new)),
        np.concatenate([[0.0, begin_s], ends_s]),
        np.concatenate([[-1.0, 0.0], ends]),
        float(context_steps.sum()),
    )


class _Queue:
    """Simulates a server with more requests than may run at the same time.

    A plan is many of these, so events cost no more than they must: no array is read or made for one, and sums are kept.
    """

    def __init__(self, work: ServerRequests, timing: Timing, limits: ServerLimits) -> None:
        new = work.new
        self._prefix, self._new, self._room = work.prefix.tolist(), new.tolist(), work.room.tolist()
        self._expected = (work.prefix + work.expected).tolist()
        self._prefill, self._context_token_s = timing.prefill, timing.decode.context_token_s
        self._step_s = timing.decode.seconds(np.arange(len(new) + 1)).tolist()
        self._kv_tokens, self._prefill_tokens = limits.kv_tokens or math.inf, limits.prefill_tokens or math.inf
        self._most_running, self._most_inflight = limits.running or math.inf, limits.inflight or len(new)
        self._most_sent_tokens, self._http_batch = limits.sent_share * limits.kv_tokens or math.inf, limits.http_batch
        self._unsent = 0
        self._batch_of = [0] * len(new)
        self._batch_left: list[int] = []
        self._batch_size: list[int] = []
        self._batch_tokens: list[int] = []
        self._num_inflight = self._sent_tokens = 0
        self._num_started, self._started = 0, [0] * len(new)
        """Number of starts, and that number when each request started."""
        self._waiting: deque[int] = deque()
        self._made = [0] * len(new)
        """Tokens that a request had when it last started."""
        self._running: list[tuple[int, int]] = []
        """(decode step after which the request ends, request)"""
        self._last_steps = [_NOT_RUNNING] * len(new)
        """Decode step after which a running request would have all tokens that it may generate."""
        self._num_near, self._near_last_steps = 0, 0
        """Running requests that may generate no more than the clipped tokens: their number and the sum of their last steps."""
        self._far: list[tuple[int, int, int]] = []
        """The other running requests, and some that no longer run: (decode step after which it is near, request, its start)"""
        self._context = 0
        """Tokens of the running requests; the newest token of each is not in the cache yet."""
        self._first_ratio = self._ratio = min(_INITIAL_RATIO * limits.conservativeness, 1.0)
        self._least_ratio = _LEAST_SHARE * self._first_ratio
        self._is_full = False
        """True after a request did not fit, until one leaves."""
        self._rest_of_prefill, self._newest = 0, 0
        """Tokens of the last pass's last request that are left to the next pass, and that request."""
        self._now_s, self._steps = 0.0, 0
        self._context_steps = 0.0
        self._finish_s, self._begin_steps, self._retractions = [0.0] * len(new), [0] * len(new), [0] * len(new)
        self._clock: list[tuple[float, int]] = [(0.0, 0)]

    def run(self) -> ServerTrace:
        self._admit()
        running = self._running
        while running:
            steps = self._fitting_steps(running[0][0] - self._steps)
            if steps:
                fall = steps * (self._first_ratio - self._least_ratio) / _RATIO_STEPS
                self._ratio = max(self._ratio - fall, self._least_ratio)
            else:
                self._retract()
            self._decode(max(steps, 1))
            while running and running[0][0] == self._steps:
                self._end(heapq.heappop(running)[1])
            self._admit()
        clock_s, clock_steps = zip(*self._clock, strict=True)
        return ServerTrace(
            np.array(self._finish_s),
            np.array(self._begin_steps, dtype=np.float64),
            np.array(self._retractions),
            np.array(clock_s),
            np.array(clock_steps, dtype=np.float64),
            self._context_steps,
        )

    def _decode(self, num_steps: int) -> None:
        running = len(self._running)
        context_steps = num_steps * self._context + running * num_steps * (num_steps - 1) / 2
        self._now_s += num_steps * self._step_s[running] + self._context_token_s * context_steps
        self._context_steps += context_steps
        self._steps += num_steps
        self._context += running * num_steps
        self._clock.append((self._now_s, self._steps))

    @property
    def _free_tokens(self) -> float:
        """Free tokens of the KV cache."""
        return self._kv_tokens - self._context + len(self._running)

    def _fitting_steps(self, wanted: int) -> int:
        """Return the decode steps until the cache is full, at most ``wanted``; a request that runs alone always fits."""
        running = len(self._running)
        if running == 1 or self._free_tokens >= wanted * running:
            return wanted
        return int(self._free_tokens // running)

    def _retract(self) -> None:
        """Return the requests with the fewest tokens to the queue until another decode step fits."""
        while True:
            _, request = one = min(self._running, key=self._worth)
            self._running.remove(one)
            self._made[request] = self._num_made(request)
            self._leave(request)
            self._retractions[request] += 1
            self._waiting.append(request)
            if len(self._running) == 1 or self._free_tokens >= len(self._running):
                break
        heapq.heapify(self._running)
        made = sum(self._num_made(request) for _, request in self._running)
        room = sum(self._room[request] for _, request in self._running)
        self._ratio = min(1.0, (made + _RETRACT_STEPS * len(self._running)) / (room + 1))

    def _worth(self, one: tuple[int, int]) -> tuple[int, int, int]:
        """Sort key of a running request; SGLang retracts the least first: few tokens, a long prefix, a late start."""
        _, request = one
        return self._num_made(request), -self._prefix[request], -self._started[request]

    def _num_made(self, request: int) -> int:
        return 1 + self._steps - self._begin_steps[request]

    def _end(self, request: int) -> None:
        self._finish_s[request] = self._now_s
        self._leave(request)
        batch = self._batch_of[request]
        self._batch_left[batch] -= 1
        if not self._batch_left[batch]:
            self._num_inflight -= self._batch_size[batch]
            self._sent_tokens -= self._batch_tokens[batch]

    def _leave(self, request: int) -> None:
        self._context -= self._prefix[request] + self._num_made(request)
        self._move_near()
        if self._last_steps[request] - self._steps <= _CLIPPED_TOKENS:
            self._num_near -= 1
            self._near_last_steps -= self._last_steps[request]
        self._last_steps[request] = _NOT_RUNNING
        self._is_full = False

    def _move_near(self) -> None:
        """Count the requests as near that have become so."""
        while self._far and self._far[0][0] <= self._steps:
            _, request, start = heapq.heappop(self._far)
            if start == self._started[request] and self._last_steps[request] != _NOT_RUNNING:
                self._num_near += 1
                self._near_last_steps += self._last_steps[request]

    def _promised(self) -> int:
        """Return the clipped tokens that the running requests may still generate."""
        self._move_near()
        num_far = len(self._running) - self._num_near
        return self._near_last_steps - self._num_near * self._steps + num_far * _CLIPPED_TOKENS

    def _admit(self) -> None:
        """Send requests and run prefill passes, as long as requests start; one that ends with its prefill frees its capacity."""
        self._send()
        while self._rest_of_prefill or (self._waiting and not self._is_full):
            self._prefill_pass()
            self._send()

    def _prefill_pass(self) -> None:
        started: list[int] = []
        free = self._free_tokens - self._ratio * self._promised()
        if self._rest_of_prefill:  # until its prefill has ended, a request is promised all of it
            promised = min(max(self._last_steps[self._newest] - self._steps, 0), _CLIPPED_TOKENS)
            free -= min(self._room[self._newest], _CLIPPED_TOKENS) + 1 - self._ratio * promised
        left, running = self._prefill_tokens - self._rest_of_prefill, len(self._running)
        while self._waiting and left > 0:
            request = self._waiting[0]
            made, room = self._made[request], self._room[request]
            tokens = self._prefix[request] + made
            fits = tokens + min(room - made, _CLIPPED_TOKENS) + 1 < free
            if running and (not fits or self._most_running <= running):
                # SGLang forgets this if nothing ran before the pass.
                self._is_full = bool(self._running)
                break
            started.append(self._waiting.popleft())
            running += 1
            free -= tokens + min(room, _CLIPPED_TOKENS) + 1
            left -= tokens
        self._rest_of_prefill = int(-left) if left < 0 else 0
        for self._newest in started:
            self._start(self._newest)

    def _start(self, request: int) -> None:
        made, prefill = self._made[request], self._prefill
        tokens = self._prefix[request] + made
        self._now_s += prefill.row_s + prefill.token_s * tokens + prefill.square_s * tokens**2
        self._clock.append((self._now_s, self._steps))
        begin = self._begin_steps[request] = self._steps - made
        self._num_started += 1
        self._started[request] = self._num_started
        self._context += tokens + 1
        last = self._last_steps[request] = begin + self._room[request] - 1
        if last - self._steps > _CLIPPED_TOKENS:
            heapq.heappush(self._far, (last - _CLIPPED_TOKENS, request, self._num_started))
        else:
            self._num_near += 1
            self._near_last_steps += last
        if self._new[request] == made + 1:
            self._end(request)
        else:
            heapq.heappush(self._running, (begin + self._new[request] - 1, request))

    def _send(self) -> None:
        """Send what the client's limits allow, several short requests in one HTTP request."""
        num, expected, room = len(self._new), self._expected, self._room
        while self._unsent < num:
            first = last = self._unsent
            end, tokens = min(first + min(self._http_batch, self._most_inflight - self._num_inflight), num), self._sent_tokens
            while last < end and (not tokens or tokens + expected[last] <= self._most_sent_tokens):
                is_alone = room[last] > MOST_BATCHED_TOKENS
                if last > first and is_alone:
                    break
                tokens += expected[last]
                last += 1
                if is_alone:
                    break
            if last == first:
                return
            size = last - first
            self._batch_of[first:last] = [len(self._batch_left)] * size
            self._batch_left.append(size)
            self._batch_size.append(size)
            self._batch_tokens.append(tokens - self._sent_tokens)
            self._num_inflight += size
            self._sent_tokens = tokens
            self._unsent = last
            self._waiting.extend(range(first, last))
