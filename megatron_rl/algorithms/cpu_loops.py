"""Compiled loops over a step's tokens on the CPU, which read memory once and allocate no intermediate arrays: sums, and GAE.

Invariants: sums are float64 for any input dtype; values outside the mask do not enter the sums; a sequence's result does
not depend on the batch that contains the sequence, down to the last bit.

A loop is compiled at its first call with the dtypes at hand, which takes a tenth of a second (GAE: about a second), and
cached on disk. Loops release the interpreter lock. For a few tokens Python runs the loops of sums uncompiled. The last bit
of a batch's sum may differ between the two, so the number of tokens alone selects one.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.system.files.loop_cache import compiled_with_cache

_SOURCES = (Path(__file__),)
MIN_TOKENS_PER_THREAD = 1 << 18
"""Tokens per thread: about half a millisecond of work, several times the cost of starting a thread."""
FEWEST = 1 << 10
"""Smallest number of tokens for which a loop of sums is compiled; fewer tokens take Python a millisecond or two."""


def array(values: Tensor) -> np.ndarray:
    """``values`` as a contiguous numpy array, without gradient. Synchronizes with the GPU."""
    return values.detach().cpu().contiguous().numpy()


def run(loop: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``loop(*arguments)``, compiled if the first argument, which has one entry per token, is long enough."""
    if len(arguments[0]) >= FEWEST:
        return compiled(loop)(*arguments)
    with np.errstate(all="ignore"):
        return loop(*arguments)


@cache
def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """``loop`` compiled for contiguous arrays; it releases the interpreter lock."""
    # A batch's sum may be reordered for SIMD (but inf and NaN are kept); a sequence's sum stays in order, for bit equality.
    may_reorder = loop is not sums_by_sequence
    return compiled_with_cache(loop, _SOURCES, nogil=True, fastmath=may_reorder and {"contract", "reassoc", "nsz"})


def sums_by_sequence(values: np.ndarray, bounds: np.ndarray, sums: np.ndarray) -> None:
    """Write the sums of ``values`` [T] over each sequence to ``sums`` [N] float64; bounds [N+1]."""
    for sequence in range(len(sums)):
        own, total = values[bounds[sequence] : bounds[sequence + 1]], 0.0
        for token in range(len(own)):
            total += np.float64(own[token])
        sums[sequence] = total


def moments(values: np.ndarray, mask: np.ndarray) -> tuple[int, float, float]:
    """(count, mean, sum of squared distances from the mean) of ``values`` [T] in ``mask`` [T] bool."""
    count, total, squares = 0, 0.0, 0.0
    for token in range(len(values)):
        if mask[token]:
            count += 1
            total += np.float64(values[token])
    mean = total / max(count, 1)
    for token in range(len(values)):
        if mask[token]:
            distance = np.float64(values[token]) - mean
            squares += distance * distance
    return count, mean, squares


def write_scaled(
    values: np.ndarray, mask: np.ndarray, center: float, divisor: float, largest: float, result: np.ndarray
) -> None:
    """Write (``values`` [T] - center) / divisor, clamped to +- ``largest``, to ``result`` [T]; 0 outside ``mask`` [T] bool."""
    for token in range(len(values)):
        result[token] = 0.0
        if mask[token]:
            scaled = (np.float64(values[token]) - center) / divisor
            result[token] = largest if scaled > largest else -largest if scaled < -largest else scaled


def target_and_error(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> tuple[int, float, float, float, float]:
    """Count and sums of R, R^2, R - V and (R - V)^2 in ``mask`` [T] bool."""
    count, target_sum, target_squares, error_sum, error_squares = 0, 0.0, 0.0, 0.0, 0.0
    for token in range(len(mask)):
        if mask[token]:
            target = np.float64(returns[token])
            error = target - np.float64(values[token])
            count += 1
            target_sum += target
            target_squares += target * target
            error_sum += error
            error_squares += error * error
    return count, target_sum, target_squares, error_sum, error_squares


def sums_by_position(values: np.ndarray, mask: np.ndarray, bounds: np.ndarray, starts: np.ndarray, sums: np.ndarray) -> None:
    """Add ``values`` [T] in ``mask`` [T] bool to ``sums`` [bins]; bin b of sequence s starts at its token ``starts[s, b]``."""
    for sequence in range(len(starts)):
        token = bounds[sequence]
        for bin in range(len(sums)):
            remaining, total = starts[sequence, bin + 1] - starts[sequence, bin], 0.0
            while remaining > 0:
                if mask[token]:
                    total += np.float64(values[token])
                    remaining -= 1
                token += 1
            sums[bin] += total


def log_ratios(numerator: np.ndarray, denominator: np.ndarray, runs: np.ndarray, largest: float, result: np.ndarray) -> None:
    """Write differences of log-probs [T] in spans ``runs`` [R, 2], clamped to +- ``largest``, to ``result`` [K]; NaN stays."""
    offset = 0
    for run in range(len(runs)):
        start, end = runs[run, 0], runs[run, 1]
        over, under, target = numerator[start:end], denominator[start:end], result[offset : offset + end - start]
        for token in range(len(target)):
            ratio = np.float64(over[token]) - np.float64(under[token])
            target[token] = largest if ratio > largest else -largest if ratio < -largest else ratio
        offset += len(target)


def ratio_sums(log_ratio: np.ndarray, excess: np.ndarray) -> tuple[float, float, float]:
    """Sums of ``excess`` = rho - 1, of excess^2 and of rho - 1 - log rho, all [K] float64."""
    total, squares, k3 = 0.0, 0.0, 0.0
    for token in range(len(log_ratio)):
        difference = excess[token]
        total += difference
        squares += difference * difference
        k3 += difference - log_ratio[token]
    return total, squares, k3


def write_weights(
    importance: np.ndarray, remains: np.ndarray, bound: float, runs: np.ndarray, weights: np.ndarray, kept: np.ndarray
) -> tuple[int, int, int, float, float]:
    """Write ``importance`` [K] float64, clamped to ``bound``, to ``weights`` [T], and ``remains`` [K] bool to ``kept`` [T].

    ``runs`` [R, 2] are the spans of the K tokens among the T. Weights are 0 where ``remains`` is False.

    Returns:
        Over the remaining tokens: their number, the number with a weight other than 0, the number clamped to the bound,
        the sum of the weights and the sum of their squares.
    """
    num_kept, num_weighted, num_clamped, total, squares, offset = 0, 0, 0, 0.0, 0.0, 0
    for run in range(len(runs)):
        start, end = runs[run, 0], runs[run, 1]
        raw, stays = importance[offset : offset + end - start], remains[offset : offset + end - start]
        span_weights, span_kept = weights[start:end], kept[start:end]
        for token in range(len(raw)):
            is_clamped = stays[token] and raw[token] > bound
            weight = bound if is_clamped else raw[token] if stays[token] else 0.0
            span_weights[token] = weight
            span_kept[token] = stays[token]
            num_kept += stays[token]
            num_clamped += is_clamped
            num_weighted += weight != 0.0
            total += weight
            squares += weight * weight
        offset += len(raw)
    return num_kept, num_weighted, num_clamped, total, squares


def gae_loop(
    rewards: Tensor, values: Tensor, bounds: Tensor, after_end: Tensor, gamma: float, decay: Tensor
) -> Tensor:
    """``A_t = delta_t + decay A_{t+1}`` with ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)``.

    Args:
        rewards, values: [T] float32 or float64 on the CPU, same dtype, any stride.
        bounds: [N+1] int64 on the CPU, checked ``cu_seqlens``.
        after_end: [N] V of the state after each sequence's last token; not read for empty sequences.
        decay: [N] float64, gamma times lambda of each sequence.

    Returns:
        [T] of the dtype of ``rewards``.
    """
    loop = compiled_loop()
    reward_array, value_array = rewards.detach().numpy(), values.detach().numpy()
    bound_array, after_array, decay_array = bounds.numpy(), after_end.detach().double().numpy(), decay.numpy()
    # np.empty instead of torch.empty, because numpy requests huge pages; faults on small pages take longer than the loop.
    result = np.empty(len(reward_array), dtype=reward_array.dtype)

    def run(span: tuple[int, int]) -> None:
        loop(reward_array, value_array, bound_array, after_array, gamma, decay_array, span, result)

    spans = thread_spans(bounds, torch.get_num_threads())
    if len(spans) == 1:
        run(spans[0])
    else:
        with ThreadPoolExecutor(len(spans), thread_name_prefix="gae") as pool:
            list(pool.map(run, spans))
    return torch.from_numpy(result)


def thread_spans(bounds: Tensor, num_threads: int) -> list[tuple[int, int]]:
    """Ranges of sequences with about equally many tokens, one per thread; a small batch is a single range."""
    num_tokens, num_sequences = int(bounds[-1]), len(bounds) - 1
    num_threads = max(1, min(num_threads, num_tokens // MIN_TOKENS_PER_THREAD))
    shares = torch.tensor([num_tokens * thread // num_threads for thread in range(1, num_threads)], dtype=torch.int64)
    cuts = torch.searchsorted(bounds, shares).tolist()
    corners = sorted({0, *cuts, num_sequences})
    return list(itertools.pairwise(corners)) or [(0, 0)]


@cache
def compiled_loop() -> Callable[..., None]:
    """``_advantage_loop``, compiled at the first call with each combination of dtypes and strides."""
    # "contract" fuses a multiplication and an addition into one instruction with one rounding.
    return compiled_with_cache(_advantage_loop, _SOURCES, nogil=True, fastmath={"contract"})


def _advantage_loop(
    rewards: np.ndarray,
    values: np.ndarray,
    bounds: np.ndarray,
    after_end: np.ndarray,
    gamma: float,
    decay: np.ndarray,
    span: tuple[int, int],
    result: np.ndarray,
) -> None:
    """Write the advantages of the sequences in [span[0], span[1]) to ``result`` [T]; see ``gae_loop``."""
    for sequence in range(span[0], span[1]):
        factor = decay[sequence]
        next_value = after_end[sequence]
        advantage = 0.0
        for token in range(bounds[sequence + 1] - 1, bounds[sequence] - 1, -1):
            value = np.float64(values[token])
            delta = rewards[token] + gamma * next_value - value
            advantage = delta + factor * advantage
            result[token] = advantage
            next_value = value
