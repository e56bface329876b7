"""Compiled loops give the same results as the uncompiled loops and as numpy."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import token_sums
from megatron_rl.algorithms.sequences import edges
from megatron_rl.algorithms.token_sums import (
    compiled,
    log_ratios,
    moments,
    ratio_sums,
    sums_by_position,
    sums_by_sequence,
    target_and_error,
    write_scaled,
    write_weights,
)


@st.composite
def tokens(draw):
    """Two arrays of values [T], mask [T], bounds [N+1] and a generator; values outside the mask may be NaN."""
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    bounds = np.cumsum([0, *draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))])
    numbers = random.normal(0, draw(st.sampled_from([1e-3, 1.0, 30.0])), (2, bounds[-1])).astype(np.float32)
    mask = random.random(bounds[-1]) < draw(st.sampled_from([0.0, 0.3, 0.95, 1.0]))
    numbers[:, ~mask] = np.nan
    return *numbers, mask, bounds, random


def both(loop, arguments, found=()):
    """The compiled loop's result and output arrays, after a check that the uncompiled loop gives the same."""
    ways = []
    for way in (compiled(loop), loop):
        arrays = [array.copy() for array in found]
        ways.append((way(*arguments, *arrays), arrays))
    for one, two in zip(*ways, strict=True):
        for left, right in zip(one or (), two or (), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)
    return ways[0]


@settings(max_examples=40, deadline=None)
@given(tokens())
def test_compiled_sums_equal_numpy(case):
    one, two, mask, bounds, _ = case
    own = one[mask].astype(np.float64)
    number, mean, squares = both(moments, (one, mask))[0]
    assert number == len(own) and mean == pytest.approx(own.mean() if number else 0.0)
    assert squares == pytest.approx(((own - mean) ** 2).sum())
    target, error = two[mask].astype(np.float64), two[mask].astype(np.float64) - own
    assert both(target_and_error, (one, two, mask))[0] == pytest.approx(
        (number, target.sum(), (target**2).sum(), error.sum(), (error**2).sum()), rel=1e-9, abs=1e-9
    )
    filled = np.where(mask, one, 0.0).astype(one.dtype)
    pairs = list(pairwise(bounds))
    for values in (filled, mask):
        (sums,) = both(sums_by_sequence, (values, bounds), [np.empty(len(pairs))])[1]
        alone = np.empty(len(pairs))
        for row, (first, end) in enumerate(pairs):
            sums_by_sequence(values[first:end], np.array([0, end - first]), alone[row : row + 1])
        assert sums.tolist() == alone.tolist()  # bit-equal
        np.testing.assert_allclose(sums, [values[first:end].sum(dtype=np.float64) for first, end in pairs], atol=1e-9)

    counts = np.array([np.count_nonzero(mask[first:end]) for first, end in pairs])
    starts = (counts[:, None] * np.arange(5) + 3) // 4
    (sums,) = both(sums_by_position, (one, mask, bounds, starts), [np.zeros(4)])[1]
    expected = np.zeros(4)
    for first, end in pairs:
        own = one[first:end][mask[first:end]].astype(np.float64)
        np.add.at(expected, np.arange(len(own)) * 4 // max(len(own), 1), own)
    np.testing.assert_allclose(sums, expected, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(tokens(), st.sampled_from([0.5, np.inf]), st.floats(0.5, 1.5))
def test_scaled_values_and_weights_are_written_inside_the_mask_only(case, largest, bound):
    one, two, mask, _, random = case
    (scaled,) = both(write_scaled, (one, mask, 0.25, 2.0, largest), [np.empty_like(one)])[1]
    expected = np.where(mask, np.clip((one.astype(np.float64) - 0.25) / 2.0, -largest, largest), 0.0)
    np.testing.assert_allclose(scaled, expected, rtol=1e-6)

    runs = edges(mask).reshape(-1, 2)
    (ratios,) = both(log_ratios, (one, two, runs, 0.5), [np.empty(np.count_nonzero(mask))])[1]
    np.testing.assert_allclose(ratios, np.clip(one[mask].astype(np.float64) - two[mask], -0.5, 0.5))
    excess = np.expm1(ratios)
    assert both(ratio_sums, (ratios, excess))[0] == pytest.approx((excess.sum(), (excess**2).sum(), (excess - ratios).sum()))

    importance, remains = np.exp(ratios), random.random(len(ratios)) < 0.8
    importance[random.random(len(ratios)) < 0.1] = 0.0
    found = [np.zeros(len(mask), one.dtype), np.zeros(len(mask), bool)]
    counts, (weights, kept) = both(write_weights, (importance, remains, bound, runs), found)
    expected = np.where(remains, np.minimum(importance, bound), 0.0)
    np.testing.assert_allclose(weights[mask], expected, rtol=1e-6)
    assert kept[mask].tolist() == remains.tolist() and not kept[~mask].any() and not weights[~mask].any()
    num_cut = np.count_nonzero(remains & (importance > bound))
    sums = (expected.sum(), (expected**2).sum())
    assert counts == pytest.approx((np.count_nonzero(remains), np.count_nonzero(expected), num_cut, *sums))


def test_loops_are_not_compiled_for_few_tokens(monkeypatch):
    monkeypatch.setattr(token_sums, "FEWEST", 3)
    monkeypatch.setattr(token_sums, "compiled", lambda loop: lambda *arguments: "compiled")
    one = np.ones(2, np.float32)
    assert token_sums.run(moments, one, one > 0) == (2, 1.0, 0.0)
    assert token_sums.run(moments, np.ones(3, np.float32), np.ones(3, bool)) == "compiled"
