"""DIS against a loop written from its formula in float64, and against hand-computed values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import dis_loss, policy_loss
from megatron_rl.config.schema import AlgorithmConfig, CorrectionConfig, OldPolicy
from megatron_rl.training.losses import policy_objective
from tests.unit.algorithms.ragged import Ragged, assert_close, gradient, ragged, vectors
from tests.unit.training.test_losses import make_batch, make_outputs

RATIOS = [1.0, 0.69, 0.71, 5.9, 6.1, 0.25]
ADVANTAGES = [1.0, 1.0, -2.0, 0.5, 1.0, -1.0]
MASK = torch.tensor([1, 1, 1, 1, 1, 0])


def mean_gradient(loss, leaf):
    return [slope / float(loss.denominator) for slope in gradient(loss, leaf)]


@given(ragged(), st.floats(0.0, 0.9), st.floats(0.0, 5.0))
def test_dis_trains_the_tokens_within_the_open_band_for_either_sign(batch: Ragged, low: float, high: float):
    new, old, advantages = batch.logprobs().requires_grad_(), batch.logprobs(), batch.normal()
    loss = dis_loss(new, old, advantages, batch.mask, clip_low=low, clip_high=high)
    slopes, expected, outside = gradient(loss, new), 0.0, 0
    for t in (t for tokens in batch.counted() for t in tokens):
        ratio = math.exp(float(new[t].detach()) - float(old[t]))
        inside = 1 - low < ratio < 1 + high
        slope = -float(advantages[t]) * ratio * inside
        assert slopes[t] == pytest.approx(slope, rel=1e-9, abs=1e-9)
        expected, outside = expected + slope * float(new[t].detach()), outside + (not inside)
    assert_close(loss.sum, expected)
    assert loss.metrics["clip_fraction"][0] == outside
    # Tokens without a gradient still count.
    assert loss.denominator == batch.mask.sum()


def test_dis_matches_hand_computed_values():
    """A band of 0.3 and 5 is (0.7, 6); the token outside the mask counts nowhere."""
    (ratios, advantages), old = vectors(RATIOS, ADVANTAGES), torch.full((6,), -4.0).double()
    new = (old + ratios.log()).requires_grad_()
    of_mathematics = dis_loss(new, old, advantages, MASK, clip_low=0.3, clip_high=5.0)
    assert mean_gradient(of_mathematics, new) == pytest.approx([-0.2, 0, 0.284, -0.59, 0, 0])
    assert float(of_mathematics.sum.detach()) / 5 == pytest.approx(0.8795108652, rel=1e-9)
    of_code = dis_loss(new, old, advantages, MASK, clip_low=0.8, clip_high=3.0)
    assert mean_gradient(of_code, new) == pytest.approx([-0.2, -0.138, 0.284, 0, 0, 0])
    assert float(of_code.sum.detach()) / 5 == pytest.approx(0.1699395403, rel=1e-9)
    assert [float(of_code.metrics[f"clip_fraction_{side}"][0]) for side in ("low", "high")] == [0, 2]
    clipped = policy_loss(new, old, advantages, MASK, clip_low=0.3, clip_high=5.0)
    assert mean_gradient(clipped, new) == pytest.approx([-0.2, -0.138, 0.284, -0.59, 0, 0])


def test_dis_is_reinforce_at_ratio_one_and_weighted_reinforce_without_a_band():
    new, old, advantages = vectors([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], [1.0, -2.0, 0.5])
    new.requires_grad_()
    assert gradient(dis_loss(new, old, advantages, torch.ones(3), clip_low=0.1, clip_high=0.1), new) == [-1.0, 2.0, -0.5]
    old = old + torch.tensor([0.5, -1.0, 2.0])
    ratios = (new.detach() - old).exp()
    unbounded = dis_loss(new, old, advantages, torch.ones(3), clip_low=1.0, clip_high=1e9)
    assert gradient(unbounded, new) == pytest.approx((-advantages * ratios).tolist())


def test_dis_of_an_empty_mask_is_zero_and_junk_outside_the_mask_is_not_read():
    new, old, advantages = vectors([-1.0, math.nan], [-1.0, math.inf], [1.0, math.nan])
    new.requires_grad_()
    loss = dis_loss(new, old, advantages, torch.zeros(2), clip_low=0.3, clip_high=5.0)
    assert float(loss.sum.detach()) == float(loss.denominator) == 0.0 and gradient(loss, new) == [0.0, 0.0]
    one = dis_loss(new, old, advantages, torch.tensor([1, 0]), clip_low=0.3, clip_high=5.0)
    assert gradient(one, new) == [-1.0, 0.0]


def test_the_band_moves_with_the_policy_and_not_with_the_steps_first_policy():
    """pi_old / mu = 1 and pi / mu = 0.6: a gate on the fixed ratio would keep the token."""
    algorithm = AlgorithmConfig(
        policy_loss="dis", clip_low=0.3, clip_high=5.0, correction=CorrectionConfig(old_policy=OldPolicy.rollout)
    )
    batch, outputs = make_batch(), make_outputs("policy")
    batch.fields.pop("weights")
    with torch.no_grad():
        outputs["logprobs"].copy_(batch.fields["old_logprobs"] + math.log(0.6))
    loss, metrics = policy_objective(algorithm, {"mask": 10.0, "policy": 10.0})(outputs, batch)
    assert float(loss.detach()) == 0.0
    assert metrics["clip_fraction_low"][0] == metrics["clip_fraction_low"][1] == batch.fields["mask"].sum()
