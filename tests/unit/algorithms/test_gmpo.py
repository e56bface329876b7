"""GMPO against loops written from its formula in float64, and against hand-computed values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import gmpo_loss
from tests.unit.algorithms.ragged import Ragged, assert_close, gradient, ragged, vectors


class TestGmpo:
    @given(ragged(), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
    def test_equals_the_geometric_mean_of_clipped_ratios(self, batch: Ragged, low: float, high: float):
        new, old = batch.logprobs(), batch.logprobs()
        outcomes = batch.uniform_of_sequence() - 0.5
        advantages = outcomes.repeat_interleave(batch.cu_seqlens.diff())
        loss = gmpo_loss(new, old, advantages, batch.mask, batch.cu_seqlens, clip_low=low, clip_high=high)
        expected, count = 0.0, 0
        for tokens, advantage in zip(batch.counted(), outcomes.tolist()):
            if tokens:
                product = 1.0
                for t in tokens:
                    ratio = math.exp(max(-20.0, min(20.0, float(new[t] - old[t]))))
                    product *= min(ratio, math.exp(high)) if advantage > 0 else max(ratio, math.exp(-low))
                expected -= advantage * product ** (1 / len(tokens))
                count += 1
        assert_close(loss.sum, expected)
        assert loss.denominator == count

    def test_matches_hand_computed_values(self):
        """Ratios e^0.2 and e^0.9 under a range of 0.4: the geometric mean is e^0.3, and the clipped token has no gradient."""
        new, old = vectors([0.2, 0.9, -0.9, 0.2], [0.0, 0.0, 0.0, 0.0])
        new.requires_grad_()
        bounds, mask = torch.tensor([0, 2, 4]), torch.ones(4)
        advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
        loss = gmpo_loss(new, old, advantages, mask, bounds, clip_low=0.4, clip_high=0.4)
        up, down = math.exp(0.3), math.exp(-0.1)
        assert loss.sum.item() == pytest.approx(-up + down) and loss.denominator == 2
        assert gradient(loss, new) == pytest.approx([-up / 2, 0.0, 0.0, down / 2])
        assert loss.metrics["clip_fraction_high"][0] == 1 and loss.metrics["clip_fraction_low"][0] == 1
