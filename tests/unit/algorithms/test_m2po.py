"""M2PO against the loop of its Algorithm 1 in float64, and against hand-computed values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import m2po_kept, m2po_loss
from tests.unit.algorithms.ragged import Ragged, assert_close, gradient, ragged, vectors

LOG_RATIOS = [0.1, 0.2, 0.4, -0.5, -0.1, 0.6, 0.0, 2.0]
ADVANTAGES = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0]
MASK = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0])


def kept_of(log_ratios: list[float], advantages: list[float] | None = None, mask: torch.Tensor | None = None) -> list[int]:
    log_ratio, advantage = vectors(log_ratios, advantages or [1.0] * len(log_ratios))
    mask = torch.ones(len(log_ratios)) if mask is None else mask
    return m2po_kept(log_ratio, torch.zeros_like(log_ratio), advantage, mask).int().tolist()


@given(ragged(), st.floats(0.01, 4.0))
def test_m2po_removes_the_largest_moves_until_their_second_moment_is_within_the_bound(batch: Ragged, bound: float):
    new, old, advantages = batch.logprobs().requires_grad_(), batch.logprobs(), batch.normal()
    kept, region = {t for tokens in batch.counted() for t in tokens}, []
    for t in sorted(kept):
        log_ratio = float(new[t].detach()) - float(old[t])
        if float(advantages[t]) * log_ratio > 0:
            region.append((log_ratio**2, t))
    moments = sum(square for square, _ in region)
    while region and sum(square for square, _ in region) / len(region) > bound:
        largest = max(region)
        region.remove(largest)
        kept.remove(largest[1])
    loss = m2po_loss(new, old, advantages, batch.mask, max_second_moment=bound)
    slopes, expected = gradient(loss, new), 0.0
    for t in range(batch.num_tokens):
        slope = -float(advantages[t]) * math.exp(float(new[t].detach()) - float(old[t])) if t in kept else 0.0
        assert slopes[t] == pytest.approx(slope, rel=1e-9, abs=1e-9)
        expected += slope
    assert_close(loss.sum, expected)
    assert loss.denominator == batch.mask.sum()
    assert_close(loss.metrics["second_moment"][0], moments)


def test_m2po_matches_hand_computed_values():
    """The moved tokens are 0, 1, 2 and 4 with a moment of 0.055; without token 2 it is 0.02."""
    log_ratio, advantages = vectors(LOG_RATIOS, ADVANTAGES)
    old = torch.full((8,), -1.0).double()
    new = (old + log_ratio).requires_grad_()
    loss = m2po_loss(new, old, advantages, MASK)
    assert kept_of(LOG_RATIOS, ADVANTAGES, MASK) == [1, 1, 0, 1, 1, 1, 1, 0]
    slopes = [slope / 7 for slope in gradient(loss, new)]
    assert slopes == pytest.approx([-0.157882, -0.174486, 0, -0.086647, 0.129262, 0.260303, -0.142857, 0], abs=1e-6)
    assert float(loss.sum.detach()) / 7 == pytest.approx(-0.1723068739, rel=1e-9)
    moment, count = loss.metrics["second_moment"]
    assert float(moment / count) == pytest.approx(0.055) and loss.metrics["clip_fraction_high"][0] == 1


def test_m2po_may_remove_every_moved_token_and_the_last_of_equal_ones_first():
    assert kept_of([0.5, 0.6]) == [0, 0]
    assert kept_of([0.3, 0.3, 0.1, 0.05]) == [1, 0, 1, 1]
    assert kept_of([]) == []


def test_m2po_chooses_other_tokens_over_parts_than_over_the_whole():
    """So the choice is over the whole mini-batch, before its parts train."""
    assert kept_of([0.1, 0.3, 0.1, 0.1]) == [1, 1, 1, 1]
    assert kept_of([0.1, 0.3]) == [1, 0]


def test_m2po_never_removes_what_moved_against_its_advantage():
    assert kept_of([2.0, -3.0], [-1.0, 1.0]) == [1, 1]


def test_m2po_without_a_bound_is_weighted_reinforce():
    log_ratio, advantages = vectors(LOG_RATIOS, ADVANTAGES)
    new = log_ratio.clone().requires_grad_()
    loss = m2po_loss(new, torch.zeros(8).double(), advantages, torch.ones(8), max_second_moment=math.inf)
    assert gradient(loss, new) == pytest.approx((-advantages * log_ratio.exp()).tolist())


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_m2po_refuses_a_bound_that_is_not_above_zero(bound: float):
    with pytest.raises(ValueError, match="max_second_moment"):
        m2po_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.ones(1), max_second_moment=bound)
