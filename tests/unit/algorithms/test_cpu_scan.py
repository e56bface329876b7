"""Laws of the compiled loop that runs the recurrence, against Python floats."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms import cpu_scan
from megatron_rl.algorithms.cpu_scan import gae_loop, thread_spans

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
    monkeypatch.setattr(cpu_scan, "MIN_TOKENS_PER_THREAD", thread_tokens)
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
        patch.setattr(cpu_scan, "MIN_TOKENS_PER_THREAD", 1)
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
        patch.setattr(cpu_scan, "MIN_TOKENS_PER_THREAD", 1)
        spans = thread_spans(bounds, threads)
    assert 1 <= len(spans) <= threads
    assert [index for first, stop in spans for index in range(first, stop)] == list(range(len(lengths)))
    longest, fair_share = max(lengths, default=0), sum(lengths) / threads
    assert all(int(bounds[stop] - bounds[first]) <= fair_share + longest + 1 for first, stop in spans)


def test_scan_of_a_small_batch_starts_no_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_scan, "ThreadPoolExecutor", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    rewards, values, bounds, after_end, decay = batch_of((300, 400))
    gae_loop(rewards, values, bounds, after_end, 1.0, decay)


def test_importing_the_algorithms_does_not_import_numba():
    code = "import sys, megatron_rl.algorithms; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
