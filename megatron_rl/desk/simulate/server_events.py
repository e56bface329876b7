"""The events of one simulated server with more requests than may run at the same time (``decoding.py`` has the model). Pure.

A plan is many of these. numba compiles them where it is installed; elsewhere, and for few requests, Python runs the same functions
on lists instead of arrays. Invariant: both give the same bits. As compiling takes longer the more arrays there are, there are three:

- ``table``: integers of each request, ``FIELDS`` of them in the order below. A request is named by the place of its first one.
- ``counts``: the integers of the server in the order below, and ``real``: its floats.
"""

import heapq
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.system.files.loop_cache import compiled_with_cache

# Of a request: facts; the state that a caller reads; the rest. _MADE and _STARTED: tokens, and number of starts, when it last started.
# _LAST_STEPS: decode step after which it would have all tokens that it may generate; near: these are at most the clipped tokens.
# The client's batches and the ring of waiting requests have one entry per request too.
PREFIX, NEW, ROOM, EXPECTED, BEGIN_STEPS, RETRACTIONS, FIRST_PASS = range(7)
_MADE, _STARTED, _LAST_STEPS, _IS_NEAR, _IS_RUNNING, _BATCH_OF, _BATCH_LEFT, _BATCH_SIZE, _BATCH_TOKENS, _WAITING = range(7, 17)
FIELDS = 17
# Of a server: its limits; sums over the running requests; states of the client and of the queue.
KV_TOKENS, PREFILL_TOKENS, MOST_RUNNING, MOST_INFLIGHT, HTTP_BATCH = range(5)
_STEPS, _CONTEXT, _NUM_NEAR, _NEAR_LAST_STEPS, _NUM_STARTED, _NUM_PASSES = range(5, 11)
_UNSENT, _NEXT_BATCH, _NUM_INFLIGHT, _SENT_TOKENS, _FIRST_WAITING, _NUM_WAITING = range(11, 17)
_IS_FULL, _REST_OF_PREFILL, _NEWEST = range(17, 20)
NUM_COUNTS = 20
MOST_SENT_TOKENS, ROW_S, TOKEN_S, SQUARE_S, CONTEXT_TOKEN_S, FIRST_RATIO, LEAST_RATIO, RATIO, NOW_S, CONTEXT_STEPS = range(10)

# The names of SGLang's own variables follow their values (srt/environ.py, managers/schedule_policy.py).
CLIPPED_TOKENS = 4096  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
_RATIO_STEPS = 600  # SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS
_RETRACT_STEPS = 20  # SGLANG_RETRACT_DECODE_STEPS
MOST_BATCHED_TOKENS = 128
"""The client sends a request that may get more new tokens alone."""
UNLIMITED = 2**60
_FEWEST_COMPILED = 64
"""Requests from which the events are compiled: Python simulates fewer before numba is imported."""
_PLACE = 2**32
"""A heap's entry is a decode step times this, plus a request."""

Ints = list[int]
Floats = list[float]


def simulate(table: Ints, counts: Ints, real: Floats, step_s: Floats) -> tuple[Ints, Floats, Floats, Floats, Ints]:
    """Run the events to the end. Returns ``table`` and ``real``, each request's seconds, and seconds and decode steps of the clock.

    ``step_s``: seconds of a decode step by number of running requests, without the context's."""
    compiled = _compiled() if len(table) >= _FEWEST_COMPILED * FIELDS else None
    arrays: tuple[Any, ...] = (table, counts, real, step_s, [0.0] * (len(table) // FIELDS))
    if compiled:
        arrays = tuple(map(np.array, arrays))
    clock = (compiled or _run)(*arrays)
    return arrays[0], arrays[2], arrays[4], *clock


@cache
def _compiled() -> Callable[..., Any] | None:
    """``_run`` compiled by numba; None if numba is not installed."""
    try:
        from numba.extending import register_jitable
    except ImportError:
        return None
    called: tuple[Callable[..., Any], ...] = (_fitting_steps, _free_tokens, _retract, _worst, _end, _leave, _move_near, _count_near)
    for function in (*called, _wait, _admit, _prefill_pass, _start, _send, _end_of_batch):
        register_jitable(function)
    return compiled_with_cache(_run, (Path(__file__),))


def _run(table: Ints, counts: Ints, real: Floats, step_s: Floats, finish_s: Floats) -> tuple[Floats, Ints]:
    clock_s, clock_steps = [0.0], [0]
    # A heap of the running requests by the decode step after which they end, and one by the step after which they are near.
    running = [0 for _ in range(0)]
    far = [0 for _ in range(0)]
    _admit(table, counts, real, finish_s, running, far, clock_s, clock_steps)
    while len(running):
        wanted = _fitting_steps(counts, running)
        if wanted:
            fall = wanted * (real[FIRST_RATIO] - real[LEAST_RATIO]) / _RATIO_STEPS
            real[RATIO] = max(real[RATIO] - fall, real[LEAST_RATIO])
        else:
            _retract(table, counts, real, running, far)
        steps, number = max(wanted, 1), len(running)
        context_steps = steps * counts[_CONTEXT] + number * steps * (steps - 1) / 2
        real[NOW_S] += steps * step_s[number] + real[CONTEXT_TOKEN_S] * context_steps
        real[CONTEXT_STEPS] += context_steps
        counts[_STEPS] += steps
        counts[_CONTEXT] += number * steps
        clock_s.append(real[NOW_S])
        clock_steps.append(counts[_STEPS])
        while len(running) and running[0] // _PLACE == counts[_STEPS]:
            _end(table, counts, real, finish_s, far, heapq.heappop(running) % _PLACE)
        _admit(table, counts, real, finish_s, running, far, clock_s, clock_steps)
    return clock_s, clock_steps


def _fitting_steps(counts: Ints, running: Ints) -> int:
    """Return the decode steps until a request ends or the cache is full; a request that runs alone always fits."""
    wanted, free = running[0] // _PLACE - counts[_STEPS], _free_tokens(counts, running)
    if len(running) == 1 or free >= wanted * len(running):
        return wanted
    return free // len(running)


def _free_tokens(counts: Ints, running: Ints) -> int:
    """Free tokens of the KV cache; the newest token of each running request is not in it yet."""
    return counts[KV_TOKENS] - counts[_CONTEXT] + len(running)


def _retract(table: Ints, counts: Ints, real: Floats, running: Ints, far: Ints) -> None:
    """Return the requests with the fewest tokens to the queue until another decode step fits."""
    while True:
        request = running.pop(_worst(table, running)) % _PLACE
        table[request + _MADE] = 1 + counts[_STEPS] - table[request + BEGIN_STEPS]
        _leave(table, counts, far, request)
        table[request + RETRACTIONS] += 1
        _wait(table, counts, request)
        if len(running) == 1 or _free_tokens(counts, running) >= len(running):
            break
    heapq.heapify(running)
    made = room = 0
    for entry in running:
        made += 1 + counts[_STEPS] - table[entry % _PLACE + BEGIN_STEPS]
        room += table[entry % _PLACE + ROOM]
    real[RATIO] = min(1.0, (made + _RETRACT_STEPS * len(running)) / (room + 1))


def _worst(table: Ints, running: Ints) -> int:
    """Return the place of the request that SGLang retracts first: few tokens, a long prefix, a late start."""
    worst = 0
    for place in range(1, len(running)):
        one, least = running[place] % _PLACE, running[worst] % _PLACE
        worth = (-table[one + BEGIN_STEPS], -table[one + PREFIX], -table[one + _STARTED])
        if worth < (-table[least + BEGIN_STEPS], -table[least + PREFIX], -table[least + _STARTED]):
            worst = place
    return worst


def _end(table: Ints, counts: Ints, real: Floats, finish_s: Floats, far: Ints, request: int) -> None:
    finish_s[request // FIELDS] = real[NOW_S]
    _leave(table, counts, far, request)
    batch = table[request + _BATCH_OF]
    table[batch + _BATCH_LEFT] -= 1
    if not table[batch + _BATCH_LEFT]:
        counts[_NUM_INFLIGHT] -= table[batch + _BATCH_SIZE]
        counts[_SENT_TOKENS] -= table[batch + _BATCH_TOKENS]


def _leave(table: Ints, counts: Ints, far: Ints, request: int) -> None:
    counts[_CONTEXT] -= table[request + PREFIX] + 1 + counts[_STEPS] - table[request + BEGIN_STEPS]
    _move_near(table, counts, far)
    if table[request + _IS_NEAR]:
        table[request + _IS_NEAR] = 0
        counts[_NUM_NEAR] -= 1
        counts[_NEAR_LAST_STEPS] -= table[request + _LAST_STEPS]
    table[request + _IS_RUNNING] = 0
    counts[_IS_FULL] = 0


def _move_near(table: Ints, counts: Ints, far: Ints) -> None:
    """Count the requests as near that have become so. An entry may be of an earlier start: then another one follows."""
    while len(far) and far[0] // _PLACE <= counts[_STEPS]:
        request = heapq.heappop(far) % _PLACE
        left = table[request + _LAST_STEPS] - counts[_STEPS]
        if table[request + _IS_RUNNING] and not table[request + _IS_NEAR] and left <= CLIPPED_TOKENS:
            _count_near(table, counts, request)


def _count_near(table: Ints, counts: Ints, request: int) -> None:
    table[request + _IS_NEAR] = 1
    counts[_NUM_NEAR] += 1
    counts[_NEAR_LAST_STEPS] += table[request + _LAST_STEPS]


def _wait(table: Ints, counts: Ints, request: int) -> None:
    """Append the request to the queue."""
    end = counts[_FIRST_WAITING] + counts[_NUM_WAITING] * FIELDS
    table[end % len(table) + _WAITING] = request
    counts[_NUM_WAITING] += 1


def _admit(
    table: Ints,
    counts: Ints,
    real: Floats,
    finish_s: Floats,
    running: Ints,
    far: Ints,
    clock_s: Floats,
    clock_steps: Ints,
) -> None:
    """Send requests and run prefill passes, as long as requests start; one that ends with its prefill frees its capacity."""
    _send(table, counts, real)
    while counts[_REST_OF_PREFILL] or (counts[_NUM_WAITING] and not counts[_IS_FULL]):
        for _ in range(_prefill_pass(table, counts, real, running, far)):
            request = table[counts[_FIRST_WAITING] + _WAITING]
            counts[_FIRST_WAITING] = (counts[_FIRST_WAITING] + FIELDS) % len(table)
            counts[_NUM_WAITING] -= 1
            _start(table, counts, real, far, request)
            clock_s.append(real[NOW_S])
            clock_steps.append(counts[_STEPS])
            if table[request + NEW] == table[request + _MADE] + 1:
                _end(table, counts, real, finish_s, far, request)
            else:
                heapq.heappush(running, (table[request + BEGIN_STEPS] + table[request + NEW] - 1) * _PLACE + request)
        _send(table, counts, real)


def _prefill_pass(table: Ints, counts: Ints, real: Floats, running: Ints, far: Ints) -> int:
    """Return how many requests at the head of the queue start in the next pass."""
    counts[_NUM_PASSES] += 1
    _move_near(table, counts, far)
    # The clipped tokens that the running requests may still generate.
    near = counts[_NEAR_LAST_STEPS] - counts[_NUM_NEAR] * counts[_STEPS]
    free = _free_tokens(counts, running) - real[RATIO] * (near + (len(running) - counts[_NUM_NEAR]) * CLIPPED_TOKENS)
    if counts[_REST_OF_PREFILL]:  # until its prefill has ended, a request is promised all of it
        newest = counts[_NEWEST]
        left_steps = table[newest + _LAST_STEPS] - counts[_STEPS] if table[newest + _IS_RUNNING] else 0
        promised = min(max(left_steps, 0), CLIPPED_TOKENS)
        free -= min(table[newest + ROOM], CLIPPED_TOKENS) + 1 - real[RATIO] * promised
    left, num_running, num_started = counts[PREFILL_TOKENS] - counts[_REST_OF_PREFILL], len(running), 0
    while num_started < counts[_NUM_WAITING] and left > 0:
        place = counts[_FIRST_WAITING] + num_started * FIELDS
        request = table[place % len(table) + _WAITING]
        made, room = table[request + _MADE], table[request + ROOM]
        tokens = table[request + PREFIX] + made
        fits = tokens + min(room - made, CLIPPED_TOKENS) + 1 < free
        if num_running and (not fits or counts[MOST_RUNNING] <= num_running):
            # SGLang forgets this if nothing ran before the pass.
            counts[_IS_FULL] = 1 if len(running) else 0
            break
        num_started += 1
        num_running += 1
        free -= tokens + min(room, CLIPPED_TOKENS) + 1
        left -= tokens
    # Tokens of the last request that are left to the next pass.
    counts[_REST_OF_PREFILL] = max(-left, 0)
    return num_started


def _start(table: Ints, counts: Ints, real: Floats, far: Ints, request: int) -> None:
    made = table[request + _MADE]
    tokens = table[request + PREFIX] + made
    real[NOW_S] += real[ROW_S] + real[TOKEN_S] * tokens + real[SQUARE_S] * (tokens * tokens)
    begin = counts[_STEPS] - made
    last = begin + table[request + ROOM] - 1
    counts[_NEWEST] = request
    counts[_NUM_STARTED] += 1
    table[request + _STARTED] = counts[_NUM_STARTED]
    table[request + BEGIN_STEPS] = begin
    table[request + _LAST_STEPS] = last
    table[request + _IS_RUNNING] = 1
    if not table[request + FIRST_PASS]:
        table[request + FIRST_PASS] = counts[_NUM_PASSES]
    counts[_CONTEXT] += tokens + 1
    if last - counts[_STEPS] > CLIPPED_TOKENS:
        heapq.heappush(far, (last - CLIPPED_TOKENS) * _PLACE + request)
    else:
        _count_near(table, counts, request)


def _send(table: Ints, counts: Ints, real: Floats) -> None:
    """Send what the client's limits allow, several short requests in one HTTP request."""
    while counts[_UNSENT] < len(table):
        first, batch = counts[_UNSENT], counts[_NEXT_BATCH]
        end, tokens = _end_of_batch(table, counts, real, first)
        if end == first:
            return
        for request in range(first, end, FIELDS):
            table[request + _BATCH_OF] = batch
            _wait(table, counts, request)
        size = (end - first) // FIELDS
        table[batch + _BATCH_LEFT] = size
        table[batch + _BATCH_SIZE] = size
        table[batch + _BATCH_TOKENS] = tokens - counts[_SENT_TOKENS]
        counts[_NEXT_BATCH] += FIELDS
        counts[_NUM_INFLIGHT] += size
        counts[_SENT_TOKENS] = tokens
        counts[_UNSENT] = end


def _end_of_batch(table: Ints, counts: Ints, real: Floats, first: int) -> tuple[int, int]:
    """Return the end of the next HTTP request's requests, and the expected tokens in the cache with them."""
    request, tokens = first, counts[_SENT_TOKENS]
    most = min(counts[HTTP_BATCH], counts[MOST_INFLIGHT] - counts[_NUM_INFLIGHT])
    end = min(first + most * FIELDS, len(table))
    while request < end and (not tokens or tokens + table[request + EXPECTED] <= real[MOST_SENT_TOKENS]):
        is_alone = table[request + ROOM] > MOST_BATCHED_TOKENS
        if request > first and is_alone:
            break
        tokens += table[request + EXPECTED]
        request += FIELDS
        if is_alone:
            break
    return request, tokens
