"""Laws of the two ways to run the recurrence, the CPU's loop and the GPU's scan over blocks, against Python floats."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms import advantages, cpu_scan, egae, gae, monte_carlo_returns, scan
from megatron_rl.algorithms.cpu_scan import advantages_one_by_one, thread_spans
from megatron_rl.algorithms.scan import advantages_by_blocks

WAYS = pytest.mark.parametrize("solve", [advantages_one_by_one, advantages_by_blocks])
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


@WAYS
@pytest.mark.parametrize("slab_tokens", [64, 128, 448])
@pytest.mark.parametrize("lengths", UNEVEN)
def test_result_is_the_recurrence_in_whatever_pieces(
    monkeypatch: pytest.MonkeyPatch, solve, slab_tokens: int, lengths: tuple[int, ...]
):
    monkeypatch.setattr(scan, "CPU_SLAB_TOKENS", slab_tokens)
    monkeypatch.setattr(cpu_scan, "MIN_TOKENS_PER_THREAD", slab_tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rewards, values, bounds, after_end, decay = batch_of(lengths)
    actual = solve(rewards, values, bounds, after_end, 0.99, decay)
    assert_near(actual, by_definition(rewards, values, bounds, after_end, 0.99, decay))


@WAYS
def test_any_stride_is_read(solve):
    rewards, values, bounds, after_end, decay = batch_of((70, 5, 0, 200))
    expected = solve(rewards, values, bounds, after_end, 0.9, decay)
    spread = torch.stack([rewards, values], dim=1)
    assert torch.equal(solve(spread[:, 0], spread[:, 1], bounds, after_end, 0.9, decay), expected)
    constant = torch.full((1,), 0.25, dtype=torch.float64).expand(len(rewards))
    assert torch.equal(
        solve(rewards, constant, bounds, after_end, 0.9, decay),
        solve(rewards, constant.contiguous(), bounds, after_end, 0.9, decay),
    )


@WAYS
def test_nothing_crosses_a_border_not_even_nan(solve):
    lengths = (70, 0, 330, 64, 1, 800)
    rewards, values, bounds, after_end, decay = batch_of(lengths)
    before = solve(rewards, values, bounds, after_end, 1.0, decay)
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:]):
        disturbed = values.clone()
        disturbed[start:end] = torch.nan
        after = solve(rewards, disturbed, bounds, after_end, 1.0, decay)
        assert torch.equal(after[:start], before[:start]) and torch.equal(after[end:], before[end:])
        assert after[start:end].isnan().all()


@WAYS
def test_after_end_is_not_read_for_empty_sequences(solve):
    rewards, values, bounds, after_end, decay = batch_of((0, 5, 0, 0, 7, 0))
    after_end[[0, 2, 3, 5]] = torch.nan
    assert not solve(rewards, values, bounds, after_end, 1.0, decay).isnan().any()


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (1.0, 1.0 - 1 / (0.05 * 24576)), (0.999, 1.0)])
def test_float32_does_not_drift_with_the_length(gamma: float, lam: float):
    rewards, values, bounds, after_end, _ = batch_of((24576, 3, 8000), torch.float32)
    decay = torch.full((3,), gamma * lam, dtype=torch.float64)
    exact = by_definition(rewards, values, bounds, after_end, gamma, decay)
    by_loop = advantages_one_by_one(rewards, values, bounds, after_end, gamma, decay)
    by_blocks = advantages_by_blocks(rewards, values, bounds, after_end, gamma, decay)
    assert by_loop.dtype == by_blocks.dtype == torch.float32
    # The loop rounds once: half a unit in the last place of float32.
    torch.testing.assert_close(by_loop.double(), exact, rtol=2**-24, atol=1e-12)
    assert (by_blocks.double() - exact).abs().max() < 3e-6 * exact.abs().max()


@settings(max_examples=30)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=10), st.integers(1, 4), st.sampled_from([0.9, 1.0]))
def test_on_a_cpu_a_sequence_has_the_same_bits_alone_and_in_a_batch(lengths: list[int], threads: int, gamma: float):
    rewards, values, bounds, after_end, decay = batch_of(tuple(lengths), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_scan, "MIN_TOKENS_PER_THREAD", 1)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        together = advantages_one_by_one(rewards, values, bounds, after_end, gamma, decay)
    for index, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:])):
        one = slice(index, index + 1)
        alone = advantages_one_by_one(
            rewards[start:end], values[start:end], torch.tensor([0, end - start]), after_end[one], gamma, decay[one]
        )
        assert torch.equal(together[start:end], alone)


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 8))
def test_threads_share_whole_sequences(lengths: list[int], threads: int):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_scan, "MIN_TOKENS_PER_THREAD", 1)
        spans = thread_spans(bounds, threads)
    assert 1 <= len(spans) <= threads
    assert [index for first, stop in spans for index in range(first, stop)] == list(range(len(lengths)))
    longest, fair_share = max(lengths, default=0), sum(lengths) / threads
    assert all(int(bounds[stop] - bounds[first]) <= fair_share + longest + 1 for first, stop in spans)


def test_a_small_batch_starts_no_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_scan, "ThreadPoolExecutor", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    rewards, values, bounds, after_end, decay = batch_of((300, 400))
    advantages_one_by_one(rewards, values, bounds, after_end, 1.0, decay)


def test_without_numba_the_scan_over_blocks_does_the_work(monkeypatch: pytest.MonkeyPatch):
    rewards, values, bounds, after_end, _ = batch_of((70, 0, 300, 1))
    lam, finished = torch.tensor([0.9, 0.5, 1.0, 0.0]), torch.tensor([1, 0, 0, 1])

    def everything() -> list[Tensor]:
        return [
            gae(rewards, values, bounds, gamma=0.99, lam=lam),
            egae(rewards, values, bounds, finished, lam=lam, bootstrap=after_end),
            monte_carlo_returns(rewards, bounds, gamma=0.9),
        ]

    compiled = everything()
    monkeypatch.setitem(sys.modules, "numba", None)
    cpu_scan.compiled_loop.cache_clear()
    cpu_scan.has_numba.cache_clear()
    try:
        monkeypatch.setattr(advantages, "advantages_one_by_one", None)
        for with_numba, without in zip(compiled, everything(), strict=True):
            assert_near(without, with_numba)
    finally:
        cpu_scan.has_numba.cache_clear()


def test_importing_the_algorithms_does_not_import_numba():
    code = "import sys, megatron_rl.algorithms; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
