"""SAPO against loops written from its formula in float64, and against hand-computed values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import sapo_loss
from tests.unit.algorithms.ragged import Ragged, assert_close, gradient, ragged, vectors


class TestSapo:
    @given(ragged(), st.floats(0.2, 4.0), st.floats(0.2, 4.0))
    def test_loss_and_gradient_equal_the_gate(self, batch: Ragged, tau_positive: float, tau_negative: float):
        """f(r) = 4 / tau sigmoid(tau (r - 1)), df/dlog pi = 4 p (1 - p) r with p the sigmoid (arXiv 2511.20347)."""
        new, old, advantages = batch.logprobs().requires_grad_(), batch.logprobs(), batch.normal()
        loss = sapo_loss(new, old, advantages, batch.mask, tau_positive=tau_positive, tau_negative=tau_negative)
        slopes, expected = gradient(loss, new), 0.0
        for t in (t for tokens in batch.counted() for t in tokens):
            tau = tau_positive if advantages[t] > 0 else tau_negative
            ratio = math.exp(float(new[t].detach() - old[t]))
            gate = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700.0)))
            expected -= float(advantages[t]) * gate * 4 / tau
            assert slopes[t] == pytest.approx(-float(advantages[t]) * 4 * gate * (1 - gate) * ratio, rel=1e-6, abs=1e-6)
        assert_close(loss.sum, expected)

    def test_matches_hand_computed_values(self):
        """At r = 2 and tau = 1: f = 4 sigmoid(1) = 2.924234, df/dr = 4 * 0.731059 * 0.268941 = 0.786448."""
        new, old, advantages = vectors([math.log(2.0), 0.0], [0.0, 0.0], [1.0, -1.0])
        new.requires_grad_()
        loss = sapo_loss(new, old, advantages, torch.ones(2))
        assert loss.sum.item() == pytest.approx(-2.924234 + 2 / 1.05, abs=1e-6)
        assert gradient(loss, new) == pytest.approx([-2 * 0.786448, 1.0], abs=1e-6)
        assert loss.metrics["gate_slope"][0].item() == pytest.approx(1.786448, abs=1e-6)

    def test_gradient_is_plain_on_policy_and_fades_for_far_ratios(self):
        (old,) = vectors([-0.3, -1.0, -2.0])
        new = old.clone().requires_grad_()
        advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        assert gradient(sapo_loss(new, old, advantages, torch.ones(3)), new) == pytest.approx([-1.0, 2.0, -0.5])
        far = (old + math.log(50.0)).requires_grad_()
        assert max(map(abs, gradient(sapo_loss(far, old, advantages, torch.ones(3)), far))) < 1e-15
