"""Laws of the critic diagnostics: definitions by loops, merging by addition."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import (
    split_statistics,
    split_statistics_of,
    split_statistics_stats,
    value_by_position,
)
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged


class TestValueByPosition:
    @given(ragged(), st.integers(1, 8))
    def test_is_its_definition(self, batch: Ragged, num_bins: int):
        values, returns = batch.normal(), batch.normal()
        sums = {name: [0.0] * num_bins for name in ("value", "return", "advantage")}
        counts = [0] * num_bins
        for tokens in batch.counted():
            for rank, t in enumerate(tokens):
                bin_ = rank * num_bins // len(tokens)
                counts[bin_] += 1
                sums["value"][bin_] += float(values[t])
                sums["return"][bin_] += float(returns[t])
                sums["advantage"][bin_] += float(returns[t]) - float(values[t])
        found = value_by_position(values, returns, batch.mask, batch.cu_seqlens, num_bins)
        assert found.keys() == sums.keys()
        for name, (total, count) in found.items():
            assert_close(total, sums[name])
            assert count.tolist() == counts

    @given(ragged())
    def test_batches_merge_by_addition(self, batch: Ragged):
        values, returns = batch.normal(), batch.normal()
        cut = batch.num_sequences // 2
        middle = int(batch.cu_seqlens[cut])
        whole = value_by_position(values, returns, batch.mask, batch.cu_seqlens, 4)
        parts = [
            value_by_position(values[piece], returns[piece], batch.mask[piece], bounds, 4)
            for piece, bounds in (
                (slice(0, middle), batch.cu_seqlens[: cut + 1]),
                (slice(middle, None), batch.cu_seqlens[cut:] - middle),
            )
        ]
        for name, (total, count) in whole.items():
            assert_close(parts[0][name][0] + parts[1][name][0], total)
            assert torch.equal(parts[0][name][1] + parts[1][name][1], count)

    def test_prompts_do_not_shift_positions(self):
        values = torch.tensor([9.0, 9.0, 9.0, 0.1, 0.2, 0.3, 0.4])
        mask = torch.tensor([0, 0, 0, 1, 1, 1, 1])
        total, count = value_by_position(values, torch.zeros(7), mask, torch.tensor([0, 7]), 2)["value"]
        assert_close(total / count, [0.15, 0.35], 1e-6)

    def test_a_critic_that_scores_early_prefixes_too_low_shows_a_slope(self):
        """The initialisation bias of VC-PPO: early tokens get positive advantages."""
        ramp = torch.linspace(0, 1, 100)
        total, count = value_by_position(ramp, torch.ones(100), torch.ones(100), torch.tensor([0, 100]), 4)["advantage"]
        means = (total / count).tolist()
        assert means == sorted(means, reverse=True) and means[0] > 0.8 and means[-1] < 0.2

    def test_bad_bins_are_refused(self):
        for num_bins in (0, 1.5):
            with pytest.raises(ValueError, match="num_bins: expected a whole number of at least 1"):
                value_by_position(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.tensor([0, 1]), num_bins)


class TestSplitStatistics:
    @given(ragged(max_length=20))
    def test_is_mean_and_deviation_of_each_side(self, batch: Ragged):
        x = batch.normal()
        finished = (batch.uniform_of_sequence() < 0.5).repeat_interleave(batch.cu_seqlens.diff())
        found = split_statistics(x, batch.mask, finished)
        for side, flags in (("finished", finished), ("unfinished", ~finished)):
            numbers = x[batch.mask & flags].tolist()
            assert found[f"{side}_count"] == len(numbers)
            if numbers:
                assert found[f"{side}_mean"] == pytest.approx(statistics.fmean(numbers), abs=1e-12)
                assert found[f"{side}_std"] == pytest.approx(statistics.pstdev(numbers), abs=1e-6)
            else:
                assert f"{side}_mean" not in found and f"{side}_std" not in found

    def test_batches_merge_by_addition(self):
        x = torch.randn(50, generator=torch.Generator().manual_seed(0))
        finished, mask = torch.arange(50) % 3 == 0, torch.arange(50) % 5 != 0
        parts = [split_statistics_stats(x[p], mask[p], finished[p]) for p in (slice(0, 7), slice(7, 50))]
        assert split_statistics_of(sum(parts)) == pytest.approx(split_statistics(x, mask, finished))

    def test_equal_numbers_have_no_deviation(self):
        assert split_statistics(torch.full((7,), 0.1), torch.ones(7), torch.ones(7))["finished_std"] == 0.0

    def test_no_tokens_at_all_are_accepted(self):
        nothing = torch.zeros(0)
        assert split_statistics(nothing, nothing, nothing) == {"finished_count": 0.0, "unfinished_count": 0.0}

    def test_what_does_not_fit_is_refused_by_name(self):
        with pytest.raises(ValueError, match="finished: expected one flag a token"):
            split_statistics(torch.zeros(3), torch.ones(3), torch.ones(2))
        with pytest.raises(ValueError, match=r"stats: expected the \[2, 3\] tensor"):
            split_statistics_of(torch.zeros(5))
