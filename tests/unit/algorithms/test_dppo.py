"""DPPO against loops written from its formula in float64, and against hand-computed values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import dppo_kl_loss, dppo_tv_loss, policy_loss
from tests.unit.algorithms.ragged import Ragged, assert_close, gradient, ragged, vectors


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
