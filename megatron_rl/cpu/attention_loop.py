"""Attention of new tokens over SGLang's paged cache, as one compiled loop.

Invariant: a token's result is computed in one order of operations, down to the last bit, regardless of the rest of
the batch and of how much of its prefix was cached. Decode multiplies the query with one key at a time, prefill
with sixteen transposed keys at a time; both add the same products in the same order. bfloat16 caches are computed
in float32.

Tensors are passed as addresses; the caller (``sglang_attention.py``) has checked their shapes and dtypes.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl.cpu.numba_compile import LOWEST, ONE, ZERO, Lanes, compiled, exp, inlined, part_of, store_lanes
from megatron_rl.cpu.simd import (
    WIDTH,
    add,
    float_at,
    fma,
    greater,
    greatest_of,
    int32_at,
    int_at,
    load,
    mul,
    put_float,
    splat,
    store,
    sub,
    sum_of,
)

FEW_ROWS = 8
"""Up to this many query rows per head of keys are multiplied row by row; with more, transposing the keys pays off."""


class AttentionShape(NamedTuple):
    """Shapes of one layer's attention; ``scale`` multiplies the products."""

    num: int
    num_kv: int
    size: int
    value_size: int
    scale: float
    window: int
    """Previous tokens that a token attends to, excluding itself; -1: all."""
    sinks: int = 0
    """Address of [num] float32: each head's score of a key without value, which takes part in the softmax; 0: none."""


class KVPages(NamedTuple):
    """KV cache of one layer and the table of its requests' cache slots, as addresses and strides in elements."""

    keys: int
    values: int
    key_slot: int
    key_head: int
    value_slot: int
    value_head: int
    is_half: int
    """1 for bfloat16, 0 for float32."""
    table: int
    """[requests, context] int32: cache slot of each token of a request."""
    table_row: int


class QueryTokens(NamedTuple):
    """The new tokens of a batch, sequence by sequence, as addresses of int64 arrays."""

    num_sequences: int
    requests: int
    """[sequences] row of the request in the table."""
    prefixes: int
    """[sequences] number of tokens before the first new one."""
    counts: int
    """[sequences] number of new tokens; address 0: one token per sequence."""


def pages_of(keys: Tensor, values: Tensor, table: Tensor) -> KVPages:
    """Return the addresses and strides of a KV cache.

    keys, values: [slots, KV heads, size] of one dtype; table: [requests, context] int32; last axes dense.
    """
    return KVPages(
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        int(keys.dtype == torch.bfloat16),
        table.data_ptr(),
        table.stride(0),
    )


@inlined
def _softmax(scores: int, count: int, sink: int) -> float:
    """Write exp(score - maximum) over [count, padded to lanes] in place. Returns 1 / their sum.

    sink: address of one more score, whose exp is only added to the sum; 0: none.
    """
    padded = (count + WIDTH - 1) // WIDTH * WIDTH
    for i in range(count, padded):
        put_float(scores, i, LOWEST)  # no padding lane may be the maximum
    most = splat(LOWEST)
    for i in range(0, padded, WIDTH):
        most = greater(load(scores + 4 * i), most)
    if sink:
        most = greater(splat(float_at(sink, 0)), most)
    greatest = splat(greatest_of(most))
    total = splat(ZERO)
    for i in range(0, padded, WIDTH):
        weights = exp(sub(load(scores + 4 * i), greatest))
        store(scores + 4 * i, weights)
        if i + WIDTH <= count:
            total = add(total, weights)
    for i in range(count, padded):
        put_float(scores, i, ZERO)  # exp(-inf) is exp(-87) here, which would count in the sum
    if count < padded:
        total = add(total, load(scores + 4 * (padded - WIDTH)))
    if sink:
        return ONE / (sum_of(total) + greatest_of(exp(sub(splat(float_at(sink, 0)), greatest))))
    return ONE / sum_of(total)


@inlined
def _scores_by_row(
    pages: KVPages, row: int, head: int, span: tuple[int, int], size: int, query: int, scale: float, scores: int
) -> None:
    """Write scale * query . key for the tokens span[0]..span[1] of a sequence; query: padded to lanes."""
    element = 2 if pages.is_half else 4
    first_key = pages.keys + element * head * pages.key_head
    for token in range(span[0], span[1]):
        key = first_key + element * int32_at(row, token) * pages.key_slot
        total = splat(ZERO)
        for part in range(0, size, WIDTH):
            total = fma(load(query + 4 * part), part_of(key, part, size - part, pages.is_half), total)
        put_float(scores, token - span[0], sum_of(total) * scale)


@inlined
def _transpose(pages: KVPages, row: int, head: int, count: int, size: int, keys: int) -> int:
    """Write the first ``count`` keys as [size, padded to lanes; count, padded to two lanes]. Returns the length of a row."""
    length = (count + 2 * WIDTH - 1) // WIDTH * WIDTH
    element = 2 if pages.is_half else 4
    first_key = pages.keys + element * head * pages.key_head
    padded = (size + WIDTH - 1) // WIDTH * WIDTH
    corner = keys + 4 * padded * length
    for token in range(count):
        key = first_key + element * int32_at(row, token) * pages.key_slot
        for part in range(0, size, WIDTH):
            store(corner, part_of(key, part, size - part, pages.is_half))
            for lane in range(WIDTH):
                put_float(keys, (part + lane) * length + token, float_at(corner, lane))
    return length


@inlined
def _lane(query: int, keys: int, length: int, padded: int, lane: int) -> Lanes:
    """Partial query . key of sixteen adjacent tokens: the products of elements ``lane``, ``lane + 16``, ..., added in this order.

    query: [padded]; keys: address of the first of these tokens in ``_transpose``'s [padded, length].
    """
    total = splat(ZERO)
    for index in range(lane, padded, WIDTH):
        total = fma(splat(float_at(query, index)), load(keys + 4 * index * length), total)
    return total


@inlined
def _two_lanes(query: int, keys: int, length: int, padded: int, lane: int) -> Lanes:
    return add(_lane(query, keys, length, padded, lane), _lane(query, keys, length, padded, lane + 8))


@inlined
def _four_lanes(query: int, keys: int, length: int, padded: int, lane: int) -> Lanes:
    return add(_two_lanes(query, keys, length, padded, lane), _two_lanes(query, keys, length, padded, lane + 4))


@inlined
def _eight_lanes(query: int, keys: int, length: int, padded: int, lane: int) -> Lanes:
    return add(_four_lanes(query, keys, length, padded, lane), _four_lanes(query, keys, length, padded, lane + 2))


@inlined
def _scores_by_lane(
    keys: int, length: int, span: tuple[int, int], size: int, query: int, scale: float, scores: int
) -> None:
    """Same as ``_scores_by_row`` with transposed keys: equal sums in equal order (that of ``sum_of``), many at a time."""
    padded = (size + WIDTH - 1) // WIDTH * WIDTH
    for token in range(span[0], span[1], WIDTH):
        even = _eight_lanes(query, keys + 4 * token, length, padded, 0)
        odd = _eight_lanes(query, keys + 4 * token, length, padded, 1)
        store(scores + 4 * (token - span[0]), mul(add(even, odd), splat(scale)))


@inlined
def _mix(
    pages: KVPages, row: int, head: int, span: tuple[int, int], size: int, weights: int, factor: float, output: int
) -> None:
    """Write factor * sum of weight * value over the tokens span[0]..span[1] to output [size], in four interleaved sums."""
    element = 2 if pages.is_half else 4
    first, half = pages.values + element * head * pages.value_head, pages.is_half
    stride = element * pages.value_slot
    count = span[1] - span[0]
    for part in range(0, size, WIDTH):
        left = size - part
        # Each fma waits for the previous one of its sum, so four sums keep the pipeline full.
        a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        whole = count // 4 * 4
        for i in range(0, whole, 4):
            t = span[0] + i
            a = fma(splat(float_at(weights, i)), part_of(first + stride * int32_at(row, t), part, left, half), a)
            b = fma(splat(float_at(weights, i + 1)), part_of(first + stride * int32_at(row, t + 1), part, left, half), b)
            c = fma(splat(float_at(weights, i + 2)), part_of(first + stride * int32_at(row, t + 2), part, left, half), c)
            d = fma(splat(float_at(weights, i + 3)), part_of(first + stride * int32_at(row, t + 3), part, left, half), d)
        for i in range(whole, count):
            a = fma(splat(float_at(weights, i)), part_of(first + stride * int32_at(row, span[0] + i), part, left, half), a)
        mixed = mul(add(add(a, b), add(c, d)), splat(factor))
        store_lanes(output, part, left, mixed)


@compiled
def attend(heads: AttentionShape, pages: KVPages, rows: QueryTokens, query: int, output: int, scratch: int) -> None:
    """Compute causal attention of new tokens over the cache, which already contains their own keys and values.

    query: [new tokens, heads, size], output: [new tokens, heads, value_size], both float32 and contiguous;
    scratch: [``scratch_floats``] float32.
    """
    group = heads.num // heads.num_kv
    size, scale = heads.size, np.float32(heads.scale)
    padded_query = scratch
    scores = padded_query + 4 * (size + WIDTH)
    first = 0
    for sequence in range(rows.num_sequences):
        prefix = int_at(rows.prefixes, sequence)
        count = int_at(rows.counts, sequence) if rows.counts else 1
        row = pages.table + 4 * int_at(rows.requests, sequence) * pages.table_row
        transposed = scores + 4 * (prefix + count + 2 * WIDTH)
        for head in range(heads.num_kv):
            length = 0
            if count * group > FEW_ROWS:
                length = _transpose(pages, row, head, prefix + count, size, transposed)
            for new in range(count):
                last = prefix + new + 1
                span = (0 if heads.window < 0 else max(0, last - 1 - heads.window), last)
                for member in range(group):
                    index = (first + new) * heads.num + head * group + member
                    for part in range(0, size, WIDTH):
                        store(padded_query + 4 * part, part_of(query + 4 * index * size, part, size - part, 0))
                    if length:
                        _scores_by_lane(transposed, length, span, size, padded_query, scale, scores)
                    else:
                        _scores_by_row(pages, row, head, span, size, padded_query, scale, scores)
                    sink = heads.sinks + 4 * (head * group + member) if heads.sinks else 0
                    factor = _softmax(scores, last - span[0], sink)
                    _mix(pages, row, head, span, heads.value_size, scores, factor, output + 4 * index * heads.value_size)
        first += count


def scratch_floats(head_size: int, context: int) -> int:
    """Float32 values of scratch memory that ``attend`` needs, for sequences of up to ``context`` tokens."""
    return (head_size + 4 * WIDTH) * (context + 4 * WIDTH)


def compile_now() -> None:
    """Compile the loop or load it from the cache, so that the first request does not wait for it."""
    attend(AttentionShape(1, 1, 1, 1, 1.0, -1), KVPages(*[0] * 9), QueryTokens(0, 0, 0, 0), 0, 0, 0)
