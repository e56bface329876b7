"""Laws of the critic's loss, explained variance and diagnostics by position."""


import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import (
    explained_variance,
    explained_variance_of,
    explained_variance_stats,
    token_coefficients,
    value_by_position,
    value_loss,
)
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged, random_batch


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


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(0, 30),
    st.sampled_from([(None, None), (0.5, 0.6), (0.0, 0.0), (0.5, None), (None, 0.6)]),
)
def test_value_loss_and_gradient_equal_the_naive_formula(
    seed: int, num_tokens: int, clip: tuple[float | None, float | None]
):
    values, old, returns, mask = random_batch(seed, num_tokens)
    low, high = clip
    loss = value_loss(values, old, returns, mask, clip_low=low, clip_high=high)
    (gradient,) = torch.autograd.grad(loss.sum, values)
    clipped = values
    if low is not None:
        clipped = torch.where(clipped < old - low, old - low, clipped)
    if high is not None:
        clipped = torch.where(clipped > old + high, old + high, clipped)
    naive_sum = (0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2) * mask).sum()
    (naive_gradient,) = torch.autograd.grad(naive_sum, values)
    torch.testing.assert_close(loss.sum, naive_sum, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, naive_gradient, rtol=1e-12, atol=1e-12)
    assert loss.denominator == mask.sum()


class TestExplainedVariance:
    def test_equals_its_definition(self):
        values, _, returns, mask = random_batch(5, 200)
        values, inside = values.detach(), mask != 0
        error = (returns - values)[inside]
        expected = 1 - error.var(correction=0) / returns[inside].var(correction=0)
        torch.testing.assert_close(explained_variance(values, returns, mask), expected)

    def test_statistics_of_batches_merge_by_addition(self):
        values, _, returns, mask = random_batch(6, 100)
        values = values.detach()
        parts = [explained_variance_stats(values[p], returns[p], mask[p]) for p in (slice(0, 17), slice(17, 100))]
        torch.testing.assert_close(explained_variance_of(sum(parts)), explained_variance(values, returns, mask))

    def test_is_one_for_a_perfect_and_zero_for_a_constant_critic(self):
        returns = torch.tensor([1.0, -1.0, 1.0, 0.5])
        assert explained_variance(returns, returns, torch.ones(4)) == 1.0
        assert explained_variance(torch.full((4,), 0.3), returns, torch.ones(4)).abs() < 1e-6

    @pytest.mark.parametrize("returns", [[], [0.1], [0.1] * 7])
    def test_is_zero_for_constant_returns(self, returns: list[float]):
        target = torch.tensor(returns)
        assert explained_variance(target + 1.0, target, torch.ones(len(returns))) == 0.0

    def test_rejects_statistics_of_other_shapes(self):
        with pytest.raises(ValueError, match=r"stats: expected the \[5\] tensor"):
            explained_variance_of(torch.zeros(4))


def test_value_loss_accepts_token_coefficients():
    values, zeros = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    coefficients = token_coefficients(torch.ones(3), torch.tensor([0, 2, 3]), "sequence_mean")
    loss = value_loss(values, zeros, zeros, torch.ones(3), coefficients=coefficients)
    assert loss.sum == 0.5 * ((1.0 + 4.0) / 2 + 9.0) and loss.denominator == 2.0
