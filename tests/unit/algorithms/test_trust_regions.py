"""SAPO, GMPO and DPPO against loops written from their formulas in float64, and against hand-computed values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms import dppo_kl_loss, dppo_tv_loss, gmpo_loss, policy_loss, sapo_loss
from megatron_rl.algorithms.loss import Loss
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged


def gradient(loss: Loss, leaf: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss.sum, leaf)
    return found.tolist()


def vectors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


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


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


class TestDppo:
    @given(ragged(), st.floats(0.0, 0.9), st.floats(0.0, 0.9), st.floats(0.5, 30.0))
    def test_token_trains_until_the_policy_moved_too_far(
        self, batch: Ragged, low: float, high: float, max_ratio: float
    ):
        """A sg[min(r, c)] grad log pi, masked by p - p_old (TV) or the binary KL (arXiv 2602.04879)."""
        new, old, advantages = batch.logprobs().requires_grad_(), batch.logprobs(), batch.normal()
        for loss_of in (dppo_tv_loss, dppo_kl_loss):
            loss = loss_of(new, old, advantages, batch.mask, clip_low=low, clip_high=high, max_ratio=max_ratio)
            slopes, expected = gradient(loss, new), 0.0
            for t in (t for tokens in batch.counted() for t in tokens):
                p, q, advantage = math.exp(float(new[t])), math.exp(float(old[t])), float(advantages[t])
                if loss_of is dppo_tv_loss:
                    kept = p - q <= high if advantage > 0 else p - q >= -low
                else:
                    kept = binary_kl(q, p) <= (high if advantage > 0 else low) or (p <= q if advantage > 0 else p >= q)
                slope = -advantage * min(p / q, max_ratio) * kept
                assert slopes[t] == pytest.approx(slope, rel=1e-9, abs=1e-9)
                expected += slope * float(new[t])
            assert_close(loss.sum, expected)

    def test_matches_hand_computed_values(self):
        """p 0.9 from 0.5 has moved 0.4 up; 0.52 from 0.5 has not; 0.1 from 0.5 down; binary KL(0.5 || 0.9) = 0.510826."""
        new, old = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.9, 0.52, 0.1, 0.9], [0.5] * 4))
        advantages, mask = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64), torch.ones(4)
        new.requires_grad_()
        for loss_of, limit in ((dppo_tv_loss, 0.2), (dppo_kl_loss, 0.05), (dppo_kl_loss, 0.5108)):
            loss = loss_of(new, old, advantages, mask, clip_low=limit, clip_high=limit)
            assert gradient(loss, new) == pytest.approx([0.0, -1.04, 0.0, 1.8])
            assert loss.metrics["clip_fraction"][0] == 2 and loss.metrics["clip_fraction_high"][0] == 1
        open_again = dppo_kl_loss(new, old, advantages, mask, clip_low=0.52, clip_high=0.52)
        assert gradient(open_again, new) == pytest.approx([-1.8, -1.04, 0.2, 1.8])

    def test_rare_tokens_may_double_and_certain_tokens_stay_finite(self):
        new, old = vectors([math.log(2e-5), 0.0, -1e-9], [math.log(1e-5), 0.0, 0.0])
        new.requires_grad_()
        for loss_of in (dppo_tv_loss, dppo_kl_loss):
            loss = loss_of(new, old, torch.ones(3).double(), torch.ones(3), clip_low=0.05, clip_high=0.05)
            assert gradient(loss, new) == pytest.approx([-2.0, -1.0, -1.0])
        clipped = policy_loss(new, old, torch.ones(3).double(), torch.ones(3), clip_low=0.2, clip_high=0.28)
        assert gradient(clipped, new)[0] == 0.0

    @pytest.mark.parametrize("wrong", [{"clip_low": -0.1}, {"clip_high": math.nan}, {"max_ratio": 0.0}])
    def test_rejects_negative_ranges(self, wrong: dict):
        settings = {"clip_low": 0.1, "clip_high": 0.1, "max_ratio": 20.0, **wrong}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dppo_tv_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.ones(1), **settings)
