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

import math
from dataclasses import dataclass

import numpy as np

from megatron_rl.desk.simulate import server_events as events
from megatron_rl.desk.simulate.timing import Timing

# The names of SGLang's own variables follow their values (srt/environ.py).
_INITIAL_RATIO, _LEAST_SHARE = 0.7, 0.14  # SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR


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
    some = _served_at_once(work.prefix, work.new, timing) if _all_fit(work, limits) else served_in_turns(work, timing, limits)[0]
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
    share = np.bincount(sizes, new) / np.maximum(np.bincount(sizes, np.where(new > 0, room, 0)), 1)
    return np.ceil(share[sizes] * room).astype(np.int64)


def _all_fit(work: ServerRequests, limits: ServerLimits) -> bool:
    """True if no limit delays or stops any of the requests."""
    if any(0 < limit < len(work.new) for limit in (limits.running, limits.inflight)):
        return False
    promised = int((work.prefix + np.maximum(work.new, np.minimum(work.room, events.CLIPPED_TOKENS)) + 1).sum())
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


def served_in_turns(work: ServerRequests, timing: Timing, limits: ServerLimits) -> tuple[ServerTrace, list[int]]:
    """Simulate requests of which some wait for others; also returns the number of the prefill pass in which each started first."""
    num, fields, unlimited = len(work.new), events.FIELDS, events.UNLIMITED
    table = np.zeros((num, fields), dtype=np.int64)
    table[:, : events.EXPECTED + 1] = np.stack([work.prefix, work.new, work.room, work.prefix + work.expected], axis=1)
    most = (limits.kv_tokens, limits.prefill_tokens, limits.running, limits.inflight or num, limits.http_batch)
    counts = [*(limit or unlimited for limit in most), *([0] * (events.NUM_COUNTS - len(most)))]
    first_ratio, prefill = min(_INITIAL_RATIO * limits.conservativeness, 1.0), timing.prefill
    costs = (prefill.row_s, prefill.token_s, prefill.square_s, timing.decode.context_token_s)
    ratios = (first_ratio, _LEAST_SHARE * first_ratio, first_ratio)
    real = [*map(float, (limits.sent_share * limits.kv_tokens or math.inf, *costs, *ratios)), 0.0, 0.0]
    step_s = timing.decode.seconds(np.arange(num + 1)).tolist()
    flat, real, finish_s, clock_s, clock_steps = events.simulate(table.ravel().tolist(), counts, real, step_s)
    ended = np.array(flat).reshape(num, fields)
    trace = ServerTrace(
        np.array(finish_s),
        ended[:, events.BEGIN_STEPS].astype(np.float64),
        ended[:, events.RETRACTIONS],
        np.array(clock_s),
        np.array(clock_steps, dtype=np.float64),
        float(real[events.CONTEXT_STEPS]),
    )
    return trace, ended[:, events.FIRST_PASS].tolist()
