"""Laws of pairwise scores and of the Bradley-Terry loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import bradley_terry_coefficients, bradley_terry_loss, pairwise_score, swap_consistency
from tests.unit.algorithms.ragged import assert_close

PROBABILITY = st.floats(0, 1)


class TestPairwiseScore:
    @given(PROBABILITY, PROBABILITY)
    def test_is_antisymmetric_and_within_zero_and_one(self, p_ab: float, p_ba: float):
        score = pairwise_score(p_ab, p_ba)
        assert 0.0 <= score <= 1.0
        assert score == pytest.approx(0.5 * (p_ab + 1 - p_ba), abs=1e-15)
        assert score + pairwise_score(p_ba, p_ab) == pytest.approx(1.0, abs=1e-15)

    @given(PROBABILITY)
    def test_response_ties_with_itself(self, p: float):
        assert pairwise_score(p, p) == pytest.approx(0.5, abs=1e-15)

    def test_accepts_floats_and_tensors(self):
        assert pairwise_score(0.9, 0.3) == pytest.approx(0.8)
        found = pairwise_score(torch.tensor([0.9, 0.0]), torch.tensor([0.3, 1.0]))
        torch.testing.assert_close(found, torch.tensor([0.8, 0.0]))

    @pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
    def test_rejects_values_outside_zero_and_one(self, bad: float):
        with pytest.raises(ValueError, match=r"p_first_ab: expected probabilities within \[0, 1\]"):
            pairwise_score(bad, 0.5)
        with pytest.raises(ValueError, match="p_first_ba: expected probabilities"):
            pairwise_score(torch.tensor([0.5]), torch.tensor([bad]))


class TestSwapConsistency:
    @given(st.lists(st.tuples(PROBABILITY, PROBABILITY), max_size=20))
    def test_equals_its_definition(self, pairs: list[tuple[float, float]]):
        ab, ba = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
        found = swap_consistency(ab, ba)
        contradictions = sum((p > 0.5 and 1 - q < 0.5) or (p < 0.5 and 1 - q > 0.5) for p, q in pairs)
        assert found["swap_consistency"][0] == len(pairs) - contradictions
        assert_close(found["position_gap"][0], sum(abs(p - (1 - q)) for p, q in pairs))
        assert_close(found["first_bias"][0], sum(p + q - 1 for p, q in pairs))
        assert {float(count) for _, count in found.values()} == {len(pairs)}

    def test_detects_a_judge_that_prefers_the_first_position(self):
        ninety = torch.full((10,), 0.9)
        found = {name: float(total / count) for name, (total, count) in swap_consistency(ninety, ninety).items()}
        assert found == pytest.approx({"swap_consistency": 0.0, "position_gap": 0.8, "first_bias": 0.8})
        assert pairwise_score(ninety, ninety).tolist() == pytest.approx([0.5] * 10)


SCORES = st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), max_size=20)


class TestBradleyTerry:
    @given(SCORES)
    def test_loss_is_minus_log_sigmoid_of_the_margin(self, pairs: list[tuple[float, float]]):
        chosen, rejected = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
        loss = bradley_terry_loss(chosen, rejected)
        assert_close(loss.sum, sum(math.log1p(math.exp(-(c - r))) for c, r in pairs), 1e-9)
        assert loss.denominator == len(pairs)
        accuracy = sum(1.0 if c > r else 0.5 if c == r else 0.0 for c, r in pairs)
        assert loss.metrics["accuracy"][0] == accuracy
        assert_close(loss.metrics["margin"][0], sum(c - r for c, r in pairs))

    @given(SCORES)
    def test_coefficients_times_scores_have_the_gradient_of_the_loss(self, pairs: list[tuple[float, float]]):
        chosen, rejected = (x.clone().requires_grad_() for x in torch.tensor(pairs).reshape(-1, 2).double().unbind(1))
        expected = torch.autograd.grad(bradley_terry_loss(chosen, rejected).sum, (chosen, rejected))
        coefficients = bradley_terry_coefficients(chosen, rejected)
        assert not any(c.requires_grad for c in coefficients)
        layout_free = (coefficients[0] * chosen).sum() + (coefficients[1] * rejected).sum()
        for actual, other in zip(torch.autograd.grad(layout_free, (chosen, rejected)), expected):
            assert_close(actual, other, 1e-12)

    def test_responses_of_a_pair_may_be_in_different_passes(self):
        """A linear reward model with the two responses of each pair in different passes."""
        features = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        weight = torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
        scores = features @ weight
        together = bradley_terry_loss(scores[:, 0], scores[:, 1])
        (expected,) = torch.autograd.grad(together.sum / together.denominator, weight)
        with torch.no_grad():
            first_pass = features @ weight
        coefficients = bradley_terry_coefficients(first_pass[:, 0], first_pass[:, 1])
        total = torch.zeros(3, dtype=torch.float64)
        for side in (0, 1):
            for pair in range(4):
                score = features[pair, side] @ weight
                total += torch.autograd.grad(coefficients[side][pair] / 4 * score, weight)[0]
        assert_close(total, expected)

    def test_extreme_margins_stay_finite(self):
        chosen = torch.tensor([1000.0, -1000.0], requires_grad=True)
        loss = bradley_terry_loss(chosen, torch.zeros(2))
        loss.sum.backward()
        assert loss.sum == 1000.0 and chosen.grad.tolist() == [0.0, -1.0]

    def test_rejects_other_shapes(self):
        with pytest.raises(ValueError, match="rejected: expected the same form as chosen"):
            bradley_terry_loss(torch.zeros(2), torch.zeros(3))
        with pytest.raises(ValueError, match="chosen: expected a 1-D"):
            bradley_terry_coefficients(torch.zeros(2, 1), torch.zeros(2, 1))
