"""Sums over a step's tokens on the CPU: compiled loops that go through memory once and make nothing on the way.

Invariants: sums are float64 whatever the inputs are; what a mask leaves out is not read into them. A loop is compiled at its
first call for the dtypes that it gets, which takes a tenth of a second (``cpu_scan`` says why nothing is cached on disk);
for a few tokens Python runs it as it stands. The last bit of a batch's sum may differ between the two, so the number of tokens
alone decides; a sequence's sum is the same, whatever batch it is in.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor


def array(values: Tensor) -> np.ndarray:
    """``values`` as the loops read them."""
    return values.detach().cpu().contiguous().numpy()


FEWEST = 1 << 10
"""Tokens that are worth compiling for: without it they take a millisecond or two."""


def run(loop: Callable[..., Any], *arguments: Any) -> Any:
    """``loop(*arguments)``; the first one has an entry for each token."""
    if len(arguments[0]) >= FEWEST:
        return compiled(loop)(*arguments)
    with np.errstate(all="ignore"):
        return loop(*arguments)


@cache
def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """``loop`` for contiguous arrays, without the interpreter's lock."""
    import numba  # takes a third of a second, which importing the algorithms need not

    # A batch's sum may be taken in lanes, infinities and NaN as they are; a sequence's in its order.
    return numba.njit(nogil=True, fastmath=loop is not sums_by_sequence and {"contract", "reassoc", "nsz"})(loop)


def sums_by_sequence(values: np.ndarray, bounds: np.ndarray, sums: np.ndarray) -> None:
    """``sums`` [N] float64 of ``values`` [T] over each sequence; bounds [N+1]."""
    for sequence in range(len(sums)):
        own, total = values[bounds[sequence] : bounds[sequence + 1]], 0.0
        for token in range(len(own)):
            total += np.float64(own[token])
        sums[sequence] = total


def moments(values: np.ndarray, mask: np.ndarray) -> tuple[int, float, float]:
    """(number, mean, sum of squared distances from it) of ``values`` [T] in ``mask`` [T] bool."""
    number, total, squares = 0, 0.0, 0.0
    for token in range(len(values)):
        if mask[token]:
            number += 1
            total += np.float64(values[token])
    mean = total / max(number, 1)
    for token in range(len(values)):
        if mask[token]:
            distance = np.float64(values[token]) - mean
            squares += distance * distance
    return number, mean, squares


def write_scaled(
    values: np.ndarray, mask: np.ndarray, centre: float, divisor: float, largest: float, found: np.ndarray
) -> None:
    """``found`` [T]: distances of ``values`` [T] from ``centre`` over ``divisor``, within +- ``largest``; 0 outside ``mask`` [T] bool."""
    for token in range(len(values)):
        found[token] = 0.0
        if mask[token]:
            one = (np.float64(values[token]) - centre) / divisor
            found[token] = largest if one > largest else -largest if one < -largest else one


def target_and_error(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> tuple[int, float, float, float, float]:
    """(number, sums of R, of R^2, of R - V, of (R - V)^2) in ``mask`` [T] bool."""
    number, target_sum, target_squares, error_sum, error_squares = 0, 0.0, 0.0, 0.0, 0.0
    for token in range(len(mask)):
        if mask[token]:
            target = np.float64(returns[token])
            error = target - np.float64(values[token])
            number += 1
            target_sum += target
            target_squares += target * target
            error_sum += error
            error_squares += error * error
    return number, target_sum, target_squares, error_sum, error_squares


def sums_by_position(values: np.ndarray, mask: np.ndarray, bounds: np.ndarray, starts: np.ndarray, sums: np.ndarray) -> None:
    """Adds ``values`` [T] in ``mask`` [T] bool to ``sums`` [bins]: bin b of a sequence begins with its token number ``starts[., b]``."""
    for sequence in range(len(starts)):
        token = bounds[sequence]
        for bin in range(len(sums)):
            number, total = starts[sequence, bin + 1] - starts[sequence, bin], 0.0
            while number > 0:
                if mask[token]:
                    total += np.float64(values[token])
                    number -= 1
                token += 1
            sums[bin] += total


def log_ratios(numerator: np.ndarray, denominator: np.ndarray, runs: np.ndarray, largest: float, found: np.ndarray) -> None:
    """``found`` [K] float64: differences of log-probs [T] in ``runs`` [R, 2], cut to +- ``largest``; NaN stays."""
    place = 0
    for run in range(len(runs)):
        start, end = runs[run, 0], runs[run, 1]
        over, under, to = numerator[start:end], denominator[start:end], found[place : place + end - start]
        for token in range(len(to)):
            ratio = np.float64(over[token]) - np.float64(under[token])
            to[token] = largest if ratio > largest else -largest if ratio < -largest else ratio
        place += len(to)


def ratio_sums(log_ratio: np.ndarray, excess: np.ndarray) -> tuple[float, float, float]:
    """Sums of ``excess`` = rho - 1, of its square and of rho - 1 - log rho, all [K] float64."""
    total, squares, k3 = 0.0, 0.0, 0.0
    for place in range(len(log_ratio)):
        one = excess[place]
        total += one
        squares += one * one
        k3 += one - log_ratio[place]
    return total, squares, k3


def write_weights(
    importance: np.ndarray, remains: np.ndarray, bound: float, runs: np.ndarray, weights: np.ndarray, kept: np.ndarray
) -> tuple[int, int, int, float, float]:
    """``importance`` [K] float64, at most ``bound``, to its places in ``weights`` and ``kept`` [T], ``runs`` [R, 2] of them.

    0 and False where ``remains`` [K] bool is off. Returns of what remains (number, those whose weight is not 0, those that were
    cut to the bound, sums of weights and of their squares).
    """
    num_kept, num_weighted, num_cut, total, squares, place = 0, 0, 0, 0.0, 0.0, 0
    for run in range(len(runs)):
        start, end = runs[run, 0], runs[run, 1]
        of, stays = importance[place : place + end - start], remains[place : place + end - start]
        to, stays_there = weights[start:end], kept[start:end]
        for token in range(len(to)):
            is_cut = stays[token] and of[token] > bound
            weight = bound if is_cut else of[token] if stays[token] else 0.0
            to[token] = weight
            stays_there[token] = stays[token]
            num_kept += stays[token]
            num_cut += is_cut
            num_weighted += weight != 0.0
            total += weight
            squares += weight * weight
        place += len(to)
    return num_kept, num_weighted, num_cut, total, squares
