"""Laws of examples/curves.py: areas, first passages and censoring, and the bootstrap, against brute force."""

import itertools
import math
import statistics
import sys

import numpy as np
import pytest

from tests.unit.examples.test_examples import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from curves import Curve, bootstrap, expanded_tail, ratio, resamples, student_quantile, time_to


def curve(times, values):
    return Curve(np.array(times, dtype=float), np.array(values, dtype=float))


def random_curve(rng, num_points=9):
    return curve(np.cumsum(rng.uniform(0.1, 3, num_points)) - 0.1, rng.uniform(0, 1, num_points))


@pytest.mark.parametrize("seed", range(5))
def test_area_and_first_passage_are_those_of_a_fine_grid(seed):
    one = random_curve(np.random.default_rng(seed))
    fine = np.linspace(one.times[0], one.times[-1], 400_001)
    values = np.interp(fine, one.times, one.values)
    assert one.mean() == pytest.approx(values.mean(), abs=1e-4)
    for level in (0.2, 0.5, 0.8):
        above = np.flatnonzero(values >= level)
        expected = fine[above[0]] if len(above) else math.inf
        assert one.first_time(level) == pytest.approx(expected, abs=1e-4)


def test_a_curve_is_not_known_beyond_its_end_and_needs_rising_times():
    one = curve([0, 10], [0.2, 0.4])
    assert one.at([5.0]).tolist() == pytest.approx([0.3])
    with pytest.raises(ValueError, match="known from 0 to 10"):
        one.at([10.5])
    with pytest.raises(ValueError, match="rising"):
        curve([0, 0], [1, 2])


@pytest.mark.parametrize("num_seeds", [2, 3, 4, 5])
def test_listed_resamples_are_all_ordered_draws(num_seeds):
    counts, probabilities = resamples(num_seeds)
    drawn = {}
    for seeds in itertools.product(range(num_seeds), repeat=num_seeds):
        key = tuple(np.bincount(seeds, minlength=num_seeds))
        drawn[key] = drawn.get(key, 0) + 1 / num_seeds**num_seeds
    assert {tuple(row): p for row, p in zip(counts, probabilities, strict=True)} == pytest.approx(drawn)


def test_many_seeds_are_drawn_the_same_each_time_and_keep_the_mean():
    numbers = np.random.default_rng(3).normal(size=20)
    first, again = (bootstrap(20, lambda w: float(w @ numbers)) for _ in range(2))
    assert first == again and first.value == pytest.approx(numbers.mean())
    width = 2 * student_quantile(0.975, 19) * numbers.std(ddof=1) / math.sqrt(20)
    assert first.high - first.low == pytest.approx(width, rel=0.08)


def test_quantiles_are_students():
    for dof, expected in {1: 12.7062, 2: 4.3027, 4: 2.7764, 9: 2.2622, 30: 2.0423}.items():
        assert student_quantile(0.975, dof) == pytest.approx(expected, abs=2e-4)


def test_intervals_of_five_seeds_cover_the_mean_nearly_as_often_as_they_say():
    """Of normal numbers: about 92 of 100, without the expansion 84. Means of all resamples, as ``bootstrap`` takes them."""
    rng = np.random.default_rng(0)
    counts, probabilities = resamples(5)
    samples = rng.normal(size=(2000, 5))
    means = samples @ (counts.T / 5)
    order = np.argsort(means, axis=1)
    heaps = np.cumsum(probabilities[order], axis=1)
    covered = {}
    for tail in (expanded_tail(5, 0.025), 0.025):
        low = np.take_along_axis(means, order, 1)[np.arange(2000), (heaps < tail).sum(axis=1)]
        high = np.take_along_axis(means, order, 1)[np.arange(2000), (heaps < 1 - tail).sum(axis=1)]
        covered[tail] = float(((low <= 0) & (high >= 0)).mean())
    expanded, plain = covered.values()
    assert 0.9 < expanded < 0.95 and plain < 0.86
    one = bootstrap(5, lambda w: float(w @ samples[0]))
    assert samples[0].min() <= one.low < samples[0].mean() < one.high <= samples[0].max()


def test_a_level_that_is_not_reached_leaves_a_bound_and_an_open_interval():
    grid = np.array([0.0, 50.0, 100.0])
    values = np.array([[0.0, 0.2, 0.4], [0.0, 0.3, 0.6], [0.0, 0.3, 0.8]])
    even = np.full(3, 1 / 3)
    assert time_to(values, grid, 0.6, even) == pytest.approx((100.0, 100.0))
    assert time_to(values, grid, 0.7, even) == (100.0, math.inf)
    reached = bootstrap(3, lambda w: time_to(values, grid, 0.3, w))
    assert reached.relation == "" and reached.low < reached.value < reached.high < 100
    # Two thirds of the resamples of the first seed alone are censored: the interval is open above, not cut at the end.
    some = bootstrap(3, lambda w: time_to(values, grid, 0.55, w))
    assert some.relation == "" and some.high == math.inf and some.low < some.value
    never = bootstrap(3, lambda w: time_to(values, grid, 0.9, w))
    assert (never.value, never.relation, never.high) == (100.0, ">", math.inf)


def test_ratios_of_censored_times_are_bounds():
    known, censored = (40.0, 40.0), (100.0, math.inf)
    assert ratio((80.0, 80.0), known) == (2.0, 2.0)
    assert ratio(censored, known) == (2.5, math.inf)
    assert ratio(known, censored) == (0.0, 0.4)
    assert ratio(censored, censored) == (0.0, math.inf)
    for bounds, value, relation in (((2.5, math.inf), 2.5, ">"), ((0.0, 0.4), 0.4, "<")):
        one = bootstrap(2, lambda w, bounds=bounds: bounds)
        assert (one.value, one.relation) == (value, relation)
    assert math.isnan(bootstrap(2, lambda w: (0.0, math.inf)).value)


def test_arms_that_share_what_a_seed_does_are_told_apart_by_pairs():
    """Seeds differ by much more than arms: the interval of the ratio is that of the pairs, not of the arms."""
    base = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    other = base * np.array([2.0, 2.02, 1.98, 2.0, 2.01])
    paired = bootstrap(5, lambda w: float(w @ other) / float(w @ base))
    assert paired.low > 1.9 and paired.high < 2.1
    alone = bootstrap(5, lambda w: float(w @ other))
    assert alone.high / alone.low > 3


def test_a_single_seed_has_no_interval():
    one = bootstrap(1, lambda w: statistics.fmean(w) * 3)
    assert (one.value, one.low, one.high) == (3.0, -math.inf, math.inf)
