"""Compiled loops give the same results as the uncompiled loops and as numpy."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms import cpu_loops
from megatron_rl.algorithms.cpu_loops import (
    compiled,
    gae_loop,
    log_ratios,
    moments,
    ratio_sums,
    sums_by_position,
    sums_by_sequence,
    target_and_error,
    thread_spans,
    write_scaled,
    write_weights,
)
from megatron_rl.algorithms.sequences import edges


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
    monkeypatch.setattr(cpu_loops, "FEWEST", 3)
    monkeypatch.setattr(cpu_loops, "compiled", lambda loop: lambda *arguments: "compiled")
    one = np.ones(2, np.float32)
    assert cpu_loops.run(moments, one, one > 0) == (2, 1.0, 0.0)
    assert cpu_loops.run(moments, np.ones(3, np.float32), np.ones(3, bool)) == "compiled"


UNEVEN = [(1000,), (63, 64, 65, 1, 0, 0, 129, 700), (1,) * 300, (2, 3) * 100, (0, 0, 1, 2000, 0)]


def batch_of(lengths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """rewards [T], values [T], bounds [N+1], after_end [N], decay [N] float64."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rewards, values = (torch.randn(sum(lengths), generator=generator).to(dtype) for _ in range(2))
    after_end, decay = (torch.rand(len(lengths), generator=generator, dtype=torch.float64) for _ in range(2))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return rewards, values, bounds, after_end.to(dtype), torch.where(decay < 0.3, 1.0 - decay / 100, decay)


def by_definition(
    rewards: Tensor, values: Tensor, bounds: Tensor, after_end: Tensor, gamma: float, decay: Tensor
) -> Tensor:
    result = torch.zeros(len(rewards), dtype=torch.float64)
    for start, end, next_value, factor in zip(bounds[:-1], bounds[1:], after_end.tolist(), decay.tolist()):
        following = 0.0
        for token in reversed(range(int(start), int(end))):
            value = float(values[token])
            following = float(rewards[token]) + gamma * next_value - value + factor * following
            result[token], next_value = following, value
    return result


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("thread_tokens", [64, 128, 448])
@pytest.mark.parametrize("lengths", UNEVEN)
def test_scan_equals_the_recurrence_for_any_threads_and_lengths(
    monkeypatch: pytest.MonkeyPatch, thread_tokens: int, lengths: tuple[int, ...]
):
    monkeypatch.setattr(cpu_loops, "MIN_TOKENS_PER_THREAD", thread_tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rewards, values, bounds, after_end, decay = batch_of(lengths)
    actual = gae_loop(rewards, values, bounds, after_end, 0.99, decay)
    assert_near(actual, by_definition(rewards, values, bounds, after_end, 0.99, decay))


def test_scan_accepts_any_stride():
    rewards, values, bounds, after_end, decay = batch_of((70, 5, 0, 200))
    expected = gae_loop(rewards, values, bounds, after_end, 0.9, decay)
    spread = torch.stack([rewards, values], dim=1)
    assert torch.equal(gae_loop(spread[:, 0], spread[:, 1], bounds, after_end, 0.9, decay), expected)
    constant = torch.full((1,), 0.25, dtype=torch.float64).expand(len(rewards))
    assert torch.equal(
        gae_loop(rewards, constant, bounds, after_end, 0.9, decay),
        gae_loop(rewards, constant.contiguous(), bounds, after_end, 0.9, decay),
    )


def test_nan_does_not_cross_sequence_borders_in_the_scan():
    lengths = (70, 0, 330, 64, 1, 800)
    rewards, values, bounds, after_end, decay = batch_of(lengths)
    before = gae_loop(rewards, values, bounds, after_end, 1.0, decay)
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:]):
        disturbed = values.clone()
        disturbed[start:end] = torch.nan
        after = gae_loop(rewards, disturbed, bounds, after_end, 1.0, decay)
        assert torch.equal(after[:start], before[:start]) and torch.equal(after[end:], before[end:])
        assert after[start:end].isnan().all()


def test_scan_ignores_after_end_of_empty_sequences():
    rewards, values, bounds, after_end, decay = batch_of((0, 5, 0, 0, 7, 0))
    after_end[[0, 2, 3, 5]] = torch.nan
    assert not gae_loop(rewards, values, bounds, after_end, 1.0, decay).isnan().any()


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (1.0, 1.0 - 1 / (0.05 * 24576)), (0.999, 1.0)])
def test_scan_in_float32_does_not_drift_on_long_sequences(gamma: float, lam: float):
    rewards, values, bounds, after_end, _ = batch_of((24576, 3, 8000), torch.float32)
    decay = torch.full((3,), gamma * lam, dtype=torch.float64)
    exact = by_definition(rewards, values, bounds, after_end, gamma, decay)
    found = gae_loop(rewards, values, bounds, after_end, gamma, decay)
    assert found.dtype == torch.float32
    # The loop rounds once: half a unit in the last place of float32.
    torch.testing.assert_close(found.double(), exact, rtol=2**-24, atol=1e-12)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=10), st.integers(1, 4), st.sampled_from([0.9, 1.0]))
def test_scan_of_a_sequence_is_bit_equal_alone_and_in_a_batch(lengths: list[int], threads: int, gamma: float):
    rewards, values, bounds, after_end, decay = batch_of(tuple(lengths), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_loops, "MIN_TOKENS_PER_THREAD", 1)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        together = gae_loop(rewards, values, bounds, after_end, gamma, decay)
    for index, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:])):
        one = slice(index, index + 1)
        alone = gae_loop(
            rewards[start:end], values[start:end], torch.tensor([0, end - start]), after_end[one], gamma, decay[one]
        )
        assert torch.equal(together[start:end], alone)


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 8))
def test_scan_threads_get_whole_sequences(lengths: list[int], threads: int):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_loops, "MIN_TOKENS_PER_THREAD", 1)
        spans = thread_spans(bounds, threads)
    assert 1 <= len(spans) <= threads
    assert [index for first, stop in spans for index in range(first, stop)] == list(range(len(lengths)))
    longest, fair_share = max(lengths, default=0), sum(lengths) / threads
    assert all(int(bounds[stop] - bounds[first]) <= fair_share + longest + 1 for first, stop in spans)


def test_scan_of_a_small_batch_starts_no_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_loops, "ThreadPoolExecutor", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    rewards, values, bounds, after_end, decay = batch_of((300, 400))
    gae_loop(rewards, values, bounds, after_end, 1.0, decay)


def test_importing_the_algorithms_does_not_import_numba():
    code = "import sys, megatron_rl.algorithms; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
