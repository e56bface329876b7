"""Curves of repeated runs compared over time: means, first passages, and bootstrap intervals over seeds. Pure.

Laws:
- A curve is known at some times and taken as linear between them; beyond its last time it is not known.
- A run that has not reached a level by the end of its curve is censored: its time lies between that end and infinity.
  A ratio of two such times is known within bounds only, and its interval covers them.
- Arms are compared seed by seed: a resample takes the same seeds of both.
- Intervals are percentiles of the bootstrap distribution over seeds, expanded for few seeds (Hesterberg, arXiv
  1411.5279): of 5 normal numbers the plain ones cover the mean in 84 of 100 cases instead of 95, these in 92.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_MOST_EXACT_SEEDS = 8
"""Up to here all resamples are listed (6,435); of more seeds so many are drawn:"""
_NUM_DRAWN = 10_000


@dataclass(frozen=True)
class Curve:
    """Numbers at times. [N] each; times strictly rise."""

    times: np.ndarray
    values: np.ndarray

    def __post_init__(self) -> None:
        if len(self.times) != len(self.values) or len(self.times) < 1 or not (np.diff(self.times) > 0).all():
            raise ValueError(f"expected values at rising times, got {self.times} and {self.values}")

    def at(self, times: Sequence[float] | np.ndarray) -> np.ndarray:
        """Values at ``times``; ValueError for a time at which the curve is not known."""
        wanted = np.asarray(times, dtype=float)
        if len(wanted) and (wanted.min() < self.times[0] or wanted.max() > self.times[-1]):
            raise ValueError(f"the curve is known from {self.times[0]:g} to {self.times[-1]:g}, not at {wanted}")
        return np.interp(wanted, self.times, self.values)

    def mean(self) -> float:
        """Mean over the curve's time: the area under the curve divided by the length of that time."""
        widths = np.diff(self.times)
        return float((widths * (self.values[1:] + self.values[:-1]) / 2).sum() / widths.sum())

    def first_time(self, level: float) -> float:
        """When it first reaches ``level``; infinite if it does not."""
        above = np.flatnonzero(self.values >= level)
        if not len(above):
            return math.inf
        index = int(above[0])
        if index == 0:
            return float(self.times[0])
        share = (level - self.values[index - 1]) / (self.values[index] - self.values[index - 1])
        return float(self.times[index - 1] + share * (self.times[index] - self.times[index - 1]))


def on_grid(curves: Sequence[Curve], grid: np.ndarray) -> np.ndarray:
    """[seeds, len(grid)] values at common times."""
    return np.array([curve.at(grid) for curve in curves])


@dataclass(frozen=True)
class Estimate:
    """A number with an interval; an end of it that is infinite, or 0 of a ratio, says that the data set none."""

    value: float
    low: float
    high: float
    relation: str = ""
    """``>`` or ``<`` where the value is a bound."""


Bounds = tuple[float, float]
"""Lowest and highest that a number may be; equal where it is known."""


def resamples(num_seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """([R, num_seeds] how often each seed is in a resample, [R] its probability)."""
    if num_seeds > _MOST_EXACT_SEEDS:
        drawn = np.random.default_rng(0).multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=_NUM_DRAWN)
        return drawn, np.full(_NUM_DRAWN, 1 / _NUM_DRAWN)
    chosen = itertools.combinations_with_replacement(range(num_seeds), num_seeds)
    counts = np.array([np.bincount(seeds, minlength=num_seeds) for seeds in chosen])
    ways = [math.factorial(num_seeds) / math.prod(math.factorial(count) for count in row) for row in counts]
    return counts, np.array(ways) / num_seeds**num_seeds


def bootstrap(num_seeds: int, statistic: Callable[[np.ndarray], float | Bounds], *, confidence: float = 0.95) -> Estimate:
    """``statistic`` of a mean over seeds whose weights [num_seeds] it is given, and its interval.

    A single seed has no interval: its bounds are infinite.
    """
    value, relation = _value_and_relation(statistic(np.full(num_seeds, 1 / num_seeds)))
    if num_seeds < 2:
        return Estimate(value, -math.inf, math.inf, relation)
    counts, probabilities = resamples(num_seeds)
    found = [statistic(row / num_seeds) for row in counts]
    tail = expanded_tail(num_seeds, (1 - confidence) / 2)
    low = _quantile([_lowest(one) for one in found], probabilities, tail)
    high = -_quantile([-_highest(one) for one in found], probabilities, tail)
    return Estimate(value, low, high, relation)


def expanded_tail(num_seeds: int, tail: float) -> float:
    """Share to cut at either end so that the percentile interval of a mean is as wide as Student's."""
    wanted = student_quantile(1 - tail, num_seeds - 1) * math.sqrt(num_seeds / (num_seeds - 1))
    return NormalDist().cdf(-wanted)


def student_quantile(probability: float, dof: int) -> float:
    """Quantile of Student's t distribution for a probability above one half."""
    log_scale = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)

    def from_zero(end: float) -> float:
        # Simpson's rule in x = sqrt(dof) tan(angle), where the density is a power of a cosine.
        angles = np.linspace(0, math.atan(end / math.sqrt(dof)), 2001)
        heights = np.cos(angles) ** (dof - 1)
        step = angles[1] - angles[0]
        area = step / 3 * (heights[0] + heights[-1] + 4 * heights[1:-1:2].sum() + 2 * heights[2:-1:2].sum())
        return float(math.exp(log_scale) * math.sqrt(dof) * area)

    low, high = 0.0, 1.0e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if from_zero(middle) < probability - 0.5 else (low, middle)
    return (low + high) / 2


def time_to(values: np.ndarray, grid: np.ndarray, level: float, weights: np.ndarray) -> Bounds:
    """Bounds of the time at which the mean curve reaches ``level``; if it does not: (the end, infinity).

    values: [seeds, len(grid)]; weights: [seeds].
    """
    time = Curve(grid, weights @ values).first_time(level)
    return (time, time) if math.isfinite(time) else (float(grid[-1]), math.inf)


def ratio(above: Bounds, below: Bounds) -> Bounds:
    """Bounds of the ratio of two positive numbers that are known within bounds."""
    return (above[0] / below[1], above[1] / below[0] if math.isfinite(above[1]) else math.inf)


def _quantile(values: Sequence[float], probabilities: np.ndarray, share: float) -> float:
    """The smallest value at or below which at least ``share`` of the probability lies."""
    order = np.argsort(values, kind="stable")
    index = int(np.searchsorted(np.cumsum(probabilities[order]), share))
    return float(np.asarray(values)[order][min(index, len(order) - 1)])


def _value_and_relation(one: float | Bounds) -> tuple[float, str]:
    low, high = one if isinstance(one, tuple) else (one, one)
    if low == high:
        return low, ""
    if math.isinf(high) and low == 0.0:
        return math.nan, ""
    return (low, ">") if math.isinf(high) else (high, "<")


def _lowest(one: float | Bounds) -> float:
    return one[0] if isinstance(one, tuple) else one


def _highest(one: float | Bounds) -> float:
    return one[1] if isinstance(one, tuple) else one
