"""Simulates how long the servers take for a step's requests, by events: a request ends, or another starts. Pure.

The model follows SGLang's scheduler: requests start in order; a prefill stops decoding, computes the whole prefix and
returns the first token; then every running request grows by one token per decode step, until one ends. ``ServerLimits`` bound
the running requests. Between two events a decode step's time grows linearly with the context, so intervals are summed in closed form.
"""

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from megatron_rl.desk.simulate.timing import Timing


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server; 0 means unlimited."""

    running: int = 0
    """Requests that decode at the same time (SGLang's max-running-requests)."""
    kv_tokens: int = 0
    """Tokens that the KV cache holds (max-total-tokens). A request reserves all tokens that it will have."""
    inflight: int = 0
    """Requests that the client has sent and that have no reply yet (rollout.max_inflight_requests)."""
    http_batch: int = 32
    """Requests per HTTP request; each counts as in flight until the longest of them ends."""


@dataclass(frozen=True)
class ServerTrace:
    """The simulated progress of one server on its requests."""

    finish_s: np.ndarray
    """[requests] time in seconds of each request's last token."""
    begin_steps: np.ndarray
    """[requests] decode steps done before the request started to run."""
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


def serve(prefix: np.ndarray, new: np.ndarray, timing: Timing, limits: ServerLimits) -> ServerTrace:
    """Simulate one server. prefix, new: [requests] tokens to prefill and to generate. Requests without new tokens are not sent."""
    sent = np.flatnonzero(new > 0)
    some = _served_at_once(prefix[sent], new[sent], timing) if _all_fit(prefix[sent], new[sent], limits) else None
    if some is None:
        some = _Queue(prefix[sent], new[sent], timing, limits).run()
    finish_s, begin_steps = np.zeros(len(new)), np.zeros(len(new))
    finish_s[sent], begin_steps[sent] = some.finish_s, some.begin_steps
    return ServerTrace(finish_s, begin_steps, some.clock_s, some.clock_steps, some.context_token_steps)


def spread(num_requests: int, num_servers: int) -> list[np.ndarray]:
    """Return the requests of each server: every request goes to the least loaded one, which is round-robin."""
    return [np.arange(server, num_requests, num_servers) for server in range(num_servers)]


def _all_fit(prefix: np.ndarray, new: np.ndarray, limits: ServerLimits) -> bool:
    too_many = any(0 < limit < len(new) for limit in (limits.running, limits.inflight))
    return not too_many and not 0 < limits.kv_tokens < int((prefix + new).sum())


def _prefill_s(prefix: np.ndarray, timing: Timing) -> np.ndarray:
    work = timing.prefill
    return work.row_s + work.token_s * prefix + work.square_s * prefix.astype(np.float64) ** 2


def _served_at_once(prefix: np.ndarray, new: np.ndarray, timing: Timing) -> ServerTrace:
    """Simulate requests that all run from the start: prefills first, then decode steps with fewer and fewer requests."""
    order = np.argsort(new, kind="stable")
    steps = new[order] - 1  # the first token comes with the prefill
    prefills_s = _prefill_s(prefix, timing)
    begin_s = float(prefills_s.sum())
    ends, first = np.unique(steps, return_index=True)
    running = (len(new) - first).astype(np.float64)
    stretch = np.diff(ends, prepend=0).astype(np.float64)
    # Context before each interval: prefixes and generated tokens of the requests that still run.
    left_prefix = np.cumsum(prefix[order][::-1])[::-1][first].astype(np.float64)
    made = 1.0 + np.concatenate([[0], ends[:-1]])
    context_steps = stretch * (left_prefix + running * made) + running * stretch * (stretch - 1) / 2
    decode = timing.decode
    seconds = stretch * decode.seconds(running) + decode.context_token_s * context_steps
    ends_s = begin_s + np.cumsum(seconds)
    finish_s = np.empty(len(new))
    finish_s[order] = ends_s[np.searchsorted(ends, steps)] if len(new) else ends_s
    finish_s = np.where(new == 1, np.cumsum(prefills_s), finish_s)
    return ServerTrace(
        finish_s,
        np.zeros(len(new)),
        np.concatenate([[0.0, begin_s], ends_s]),
        np.concatenate([[-1.0, 0.0], ends]),
        float(context_steps.sum()),
    )


class _Queue:
    """Simulates a server with more requests than may run at the same time."""

    def __init__(self, prefix: np.ndarray, new: np.ndarray, timing: Timing, limits: ServerLimits) -> None:
        self._prefix, self._new = prefix.tolist(), new.tolist()
        self._prefill_s = _prefill_s(prefix, timing).tolist()
        self._timing, self._limits = timing, limits
        counts = np.arange(len(new) + 1)
        self._step_s = timing.decode.seconds(counts).tolist()
        self._unsent = 0
        self._batch_of = [0] * len(new)
        self._batch_left: list[int] = []
        self._batch_size: list[int] = []
        self._num_inflight = 0
        self._waiting: deque[int] = deque()
        self._running: list[tuple[int, int]] = []
        """(decode step after which it ends, request)"""
        self._held = 0
        """Tokens that the running requests will have at their ends."""
        self._context = 0
        self._now_s, self._steps = 0.0, 0
        self._context_steps = 0.0
        self._finish_s, self._begin_steps = [0.0] * len(new), [0] * len(new)
        self._clock: list[tuple[float, int]] = [(0.0, 0)]

    def run(self) -> ServerTrace:
        self._admit()
        while self._running:
            end, _ = self._running[0]
            self._decode(end - self._steps)
            while self._running and self._running[0][0] == end:
                self._end(heapq.heappop(self._running)[1])
            self._admit()
        clock_s, clock_steps = zip(*self._clock, strict=True)
        return ServerTrace(
            np.array(self._finish_s),
            np.array(self._begin_steps, dtype=np.float64),
            np.array(clock_s),
            np.array(clock_steps, dtype=np.float64),
            self._context_steps,
        )

    def _decode(self, num_steps: int) -> None:
        running = len(self._running)
        context_steps = num_steps * self._context + running * num_steps * (num_steps - 1) / 2
        decode = self._timing.decode
        self._now_s += num_steps * self._step_s[running] + decode.context_token_s * context_steps
        self._context_steps += context_steps
        self._steps += num_steps
        self._context += running * num_steps
        self._clock.append((self._now_s, self._steps))

    def _end(self, request: int) -> None:
        self._finish_s[request] = self._now_s
        tokens = self._prefix[request] + self._new[request]
        self._held -= tokens
        self._context -= tokens
        batch = self._batch_of[request]
        self._batch_left[batch] -= 1
        if not self._batch_left[batch]:
            self._num_inflight -= self._batch_size[batch]

    def _admit(self) -> None:
        """Send and start as many requests as the limits allow; a request that ends with its prefill frees its capacity."""
        while True:
            self._send()
            if not self._waiting or not self._has_room(self._waiting[0]):
                return
            request = self._waiting.popleft()
            self._now_s += self._prefill_s[request]
            self._clock.append((self._now_s, self._steps))
            self._begin_steps[request] = self._steps
            tokens = self._prefix[request] + self._new[request]
            self._held += tokens
            self._context += self._prefix[request] + 1
            if self._new[request] == 1:
                self._end(request)
            else:
                heapq.heappush(self._running, (self._steps + self._new[request] - 1, request))

    def _has_room(self, request: int) -> bool:
        limits = self._limits
        tokens = self._prefix[request] + self._new[request]
        fits = not limits.kv_tokens or self._held + tokens <= limits.kv_tokens or not self._running
        return fits and not 0 < limits.running <= len(self._running)

    def _send(self) -> None:
        most = self._limits.inflight or len(self._new)
        while self._unsent < len(self._new) and self._num_inflight < most:
            size = min(self._limits.http_batch, most - self._num_inflight, len(self._new) - self._unsent)
            for request in range(self._unsent, self._unsent + size):
                self._batch_of[request] = len(self._batch_left)
                self._waiting.append(request)
            self._batch_left.append(size)
            self._batch_size.append(size)
            self._num_inflight += size
            self._unsent += size
