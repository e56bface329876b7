"""The small layers of a model and seeded sampling, as compiled loops over the tokens of a batch.

Invariant: a token's result depends only on its own row, down to the last bit. Tensors are passed as addresses of
contiguous float32; the callers (``sglang_layers.py``) have checked that.
"""

from typing import NamedTuple

import numpy as np

from megatron_rl.cpu.numba_compile import LOWEST, ONE, ZERO, compiled, exp, inlined, part_of, store_lanes
from megatron_rl.cpu.simd import (
    WIDTH,
    add,
    div,
    float_at,
    fma,
    greater,
    greatest_of,
    int_at,
    load,
    mul,
    put_float,
    put_int,
    splat,
    store,
    sub,
    sum_of,
)

_LOWEST_GATE = np.float32(-88.0)
"""Smallest input of a gate: exp of its negative still fits float32."""


class SamplingArrays(NamedTuple):
    """Sampling parameters of each sequence, as addresses of [sequences]."""

    temperatures: int
    """Address of float32 values."""
    seeds: int
    """Address of int64 values."""
    positions: int
    """Address of int64 values."""


@compiled
def norm(source: int, residual: int, weight: int, output: int, num_rows: int, size: int, epsilon: float) -> None:
    """RMSNorm of rows [size]: x = source (+ residual, which becomes x), output = x / rms(x) * weight. residual 0: none."""
    for i in range(num_rows):
        x, old, y = source + 4 * i * size, residual + 4 * i * size, output + 4 * i * size
        squares = splat(ZERO)
        for part in range(0, size, WIDTH):
            left = size - part
            value = part_of(x, part, left, 0)
            if residual:
                value = add(value, part_of(old, part, left, 0))
                store_lanes(old, part, left, value)
            squares = fma(value, value, squares)
        factor = splat(ONE / np.sqrt(sum_of(squares) / np.float32(size) + np.float32(epsilon)))
        for part in range(0, size, WIDTH):
            left = size - part
            value = part_of(old if residual else x, part, left, 0)
            store_lanes(y, part, left, mul(mul(value, factor), part_of(weight, part, left, 0)))


@compiled
def gate(source: int, output: int, num_rows: int, size: int) -> None:
    """SiLU gate: silu(a) * b of rows [a of size, b of size]."""
    for i in range(num_rows):
        row, result = source + 8 * i * size, output + 4 * i * size
        for part in range(0, size, WIDTH):
            left = size - part
            a = part_of(row, part, left, 0)
            negative = sub(splat(ZERO), greater(a, splat(_LOWEST_GATE)))
            store_lanes(result, part, left, mul(div(a, add(splat(ONE), exp(negative))), part_of(row + 4 * size, part, left, 0)))


@compiled
def rotate(
    heads: int, stride: int, num_tokens: int, shape: tuple[int, int, int], positions: int, cos_sin: int, head_length: int
) -> None:
    """Rotary embedding in place, of the first shape[1] elements of every head.

    heads: [num_tokens with that stride, shape[0], head_length]; cos_sin: [positions, shape[1]], the cosines first;
    shape[2]: 1 if the halves of a head form pairs (NeoX), 0 if neighbors do (GPT-J).
    """
    half = shape[1] // 2
    next_pair, partner = (1, half) if shape[2] else (2, 1)
    for token in range(num_tokens):
        angles = cos_sin + 4 * int_at(positions, token) * shape[1]
        for head in range(shape[0]):
            x = heads + 4 * (token * stride + head * head_length)
            for i in range(half):
                cos, sin = float_at(angles, i), float_at(angles, half + i)
                a, b = float_at(x, next_pair * i), float_at(x, next_pair * i + partner)
                put_float(x, next_pair * i, a * cos - b * sin)
                put_float(x, next_pair * i + partner, b * cos + a * sin)


_MASK = 0xFFFFFFFF


@inlined
def _murmur_mix(hashed: int, word: int) -> int:
    word = (word * 0xCC9E2D51) & _MASK
    word = ((word << 15) | (word >> 17)) & _MASK
    hashed = hashed ^ ((word * 0x1B873593) & _MASK)
    hashed = ((hashed << 13) | (hashed >> 19)) & _MASK
    return (hashed * 5 + 0xE6546B64) & _MASK


@inlined
def _murmur_end(hashed: int) -> int:
    hashed = hashed ^ 16  # bytes of the four words
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _MASK
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _MASK
    return hashed ^ (hashed >> 16)


@compiled
def murmur(seed: int, position: int, column: int) -> int:
    """Same hash as ``murmur_hash.murmur_hash32``, of three int64."""
    hashed = _murmur_mix(_murmur_mix(_murmur_mix(0, seed & _MASK), (seed >> 32) & _MASK), position & _MASK)
    return _murmur_end(_murmur_mix(hashed, column))


@inlined
def _gumbel(hashed: int) -> float:
    """-log(-log(hashed / (2**32 - 1))) in float64, clipped at both ends like SGLang's."""
    log = np.log(hashed / _MASK) if hashed else -np.finfo(np.float64).max
    return -np.log(-min(log, -(2.0**-32)))


@compiled
def sample(logits: int, num_rows: int, size: int, draws: SamplingArrays, tokens: int, logprobs: int, weights: int) -> None:
    """Sample a token per row [size] of logits; the log-softmax of logits / temperature replaces the logits.

    The token is the argmax of log-prob + Gumbel noise from a hash of (seed, position, token): SGLang's seeded
    sampling. tokens: [num_rows] int64, logprobs: [num_rows] float32, weights: [size + lanes] float32.
    """
    for i in range(num_rows):
        row, temperature = logits + 4 * i * size, splat(float_at(draws.temperatures, i))
        most = splat(LOWEST)
        for part in range(0, size, WIDTH):
            left = size - part
            scaled = div(part_of(row, part, left, 0), temperature)
            store_lanes(row, part, left, scaled)
            if left >= WIDTH:
                most = greater(scaled, most)
            else:
                for j in range(left):  # lanes after the row's end are 0, which could exceed the logits
                    most = greater(splat(float_at(row, part + j)), most)
        greatest = greatest_of(most)
        total = splat(ZERO)
        for part in range(0, size, WIDTH):
            left = size - part
            store(weights + 4 * part, exp(sub(part_of(row, part, left, 0), splat(greatest))))
            for j in range(left, WIDTH):  # exp(0) in the lanes after the row's end must not count
                put_float(weights, part + j, ZERO)
            total = add(total, load(weights + 4 * part))
        seed = int_at(draws.seeds, i)
        hashed = _murmur_mix(_murmur_mix(0, seed & _MASK), (seed >> 32) & _MASK)
        hashed = _murmur_mix(hashed, int_at(draws.positions, i) & _MASK)
        best, chosen, quotient = -np.inf, 0, np.inf
        for token in range(size):
            noise = _murmur_end(_murmur_mix(hashed, token))
            # -log(u) >= 1 - u, and the token with the smallest -log(u) / weight wins: most tokens cannot win and need no logarithm.
            if (_MASK - noise) > quotient * float_at(weights, token):
                continue
            value = np.float64(float_at(row, token) - greatest) + _gumbel(noise)
            if value > best:
                best, chosen = value, token
                quotient = _MASK * np.exp(-best) * (1.0 + 1e-5)
        put_int(tokens, i, chosen)
        put_float(logprobs, i, np.float32(np.float64(float_at(row, chosen) - greatest) - np.log(np.float64(sum_of(total)))))


def compile_now() -> None:
    """Compile the loops or load them from the cache, so that the first request does not wait for them."""
    norm(0, 0, 0, 0, 0, 1, 1e-6)
    gate(0, 0, 0, 1)
    rotate(0, 0, 0, (1, 2, 1), 0, 0, 2)
    sample(0, 0, 1, SamplingArrays(0, 0, 0), 0, 0, 0)
