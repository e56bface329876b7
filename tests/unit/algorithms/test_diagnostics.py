"""Laws of the critic diagnostics: definitions by loops, merging by addition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import (
    value_by_position,
)
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged


class TestValueByPosition:
    @given(ragged(), st.integers(1, 8))
    def test_equals_its_definition(self, batch: Ragged, num_bins: int):
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

    def test_critic_too_low_on_early_prefixes_shows_a_slope(self):
        """The initialization bias of VC-PPO: early tokens get positive advantages."""
        ramp = torch.linspace(0, 1, 100)
        total, count = value_by_position(ramp, torch.ones(100), torch.ones(100), torch.tensor([0, 100]), 4)["advantage"]
        means = (total / count).tolist()
        assert means == sorted(means, reverse=True) and means[0] > 0.8 and means[-1] < 0.2

    def test_rejects_bad_bin_counts(self):
        for num_bins in (0, 1.5):
            with pytest.raises(ValueError, match="num_bins: expected a whole number of at least 1"):
                value_by_position(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.tensor([0, 1]), num_bins)
