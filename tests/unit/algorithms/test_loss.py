"""Laws of the policy, critic and language-model losses, against autograd of the naive formulas."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import lm_loss, policy_loss, value_loss
from tests.unit.algorithms.ragged import random_batch

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
MASK_DTYPES = [torch.bool, torch.int64, torch.float32]


def assert_finite(loss: object) -> None:
    numbers = [loss.sum, loss.denominator]
    numbers += [number for pair in loss.metrics.values() for number in pair]
    assert all(bool(number.isfinite()) for number in numbers)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 30), st.sampled_from([None, 1.5, 3.0, 10.0]))
def test_policy_loss_and_gradient_equal_the_naive_formula(seed: int, num_tokens: int, dual_clip: float | None):
    new, old, advantages, mask = random_batch(seed, num_tokens)
    loss = policy_loss(new, old, advantages, mask, dual_clip=dual_clip, **CLIP)
    (gradient,) = torch.autograd.grad(loss.sum, new)

    ratio = (new - old).exp()
    naive = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    if dual_clip is not None:
        naive = torch.where(advantages < 0, torch.min(naive, -advantages * dual_clip), naive)
    naive_sum = (naive * mask).sum()
    (naive_gradient,) = torch.autograd.grad(naive_sum, new)
    torch.testing.assert_close(loss.sum, naive_sum, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, naive_gradient, rtol=1e-12, atol=1e-12)
    assert loss.denominator == mask.sum()


def test_policy_gradient_at_equal_policies_is_minus_the_advantage():
    """Guards against an error of a public port, whose ratio comes from the k3 estimator and has no gradient here."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    loss = policy_loss(logprobs, logprobs.detach(), advantages, torch.ones(3), **CLIP)
    loss.sum.backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@settings(max_examples=40, deadline=None)
@given(st.floats(-6, 6), st.floats(-3, 3), st.floats(1.01, 20))
def test_dual_clip_affects_only_negative_advantages(log_ratio: float, advantage: float, dual_clip: float):
    arguments = [torch.tensor([number], dtype=torch.float64) for number in (log_ratio, 0.0, advantage, 1.0)]
    plain = policy_loss(*arguments, **CLIP)
    bounded = policy_loss(*arguments, dual_clip=dual_clip, **CLIP)
    if advantage >= 0:
        assert torch.equal(plain.sum, bounded.sum)
        assert bounded.metrics["dual_clip_fraction"][0] == 0
    else:
        assert bounded.sum <= dual_clip * abs(advantage) * (1 + 1e-12)
        assert bounded.sum <= plain.sum


def test_policy_loss_metrics_match_hand_computed_values():
    ratios = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.0, 50.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    mask = torch.ones(6)
    loss = policy_loss(ratios.log(), torch.zeros_like(ratios), advantages, mask, dual_clip=10.0, **CLIP)
    sums = {name: float(total) for name, (total, _) in loss.metrics.items()}
    assert sums["clip_fraction_low"] == 1 and sums["clip_fraction_high"] == 1 and sums["clip_fraction"] == 2
    assert sums["dual_clip_fraction"] == 1
    assert sums["ratio_mean"] == pytest.approx(float(ratios.sum()))
    assert sums["approx_kl_k1"] == pytest.approx(float(-ratios.log().sum()))
    assert sums["approx_kl_k3"] == pytest.approx(float((ratios - 1 - ratios.log()).sum()))
    assert {float(count) for _, count in loss.metrics.values()} == {6.0}


def test_policy_loss_clamps_log_ratios_to_twenty():
    logprobs = torch.tensor([100.0, -100.0], requires_grad=True)
    loss = policy_loss(logprobs, torch.zeros(2), torch.tensor([-1.0, -1.0]), torch.ones(2), **CLIP)
    loss.sum.backward()
    assert float(loss.metrics["ratio_mean"][0]) == pytest.approx(torch.tensor(20.0).exp().item())
    assert (logprobs.grad == 0).all()


@pytest.mark.parametrize("mask_dtype", MASK_DTYPES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_masked_nan_and_inf_do_not_reach_loss_or_gradient(mask_dtype: torch.dtype, poison: float):
    clean = torch.tensor([-1.0, -0.5, -2.0])
    mask = torch.tensor([1, 0, 1]).to(mask_dtype)
    losses = {
        "policy": lambda x, other: policy_loss(x, other, other, mask, dual_clip=3.0, **CLIP),
        "value": lambda x, other: value_loss(x, other, other, mask, clip_low=0.5, clip_high=0.6),
        "lm": lambda x, other: lm_loss(x, mask),
    }
    for name, compute in losses.items():
        results = []
        for filler in (0.0, poison):
            poisoned = clean.clone()
            poisoned[1] = filler
            leaf = poisoned.clone().requires_grad_()
            loss = compute(leaf, poisoned + torch.tensor([0.3, 0.0, -0.4]))
            loss.sum.backward()
            assert_finite(loss)
            assert leaf.grad[1] == 0 and leaf.grad.isfinite().all(), name
            results.append((loss.sum.detach(), leaf.grad))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_losses_of_an_empty_mask_are_finite_zeros(num_tokens: int):
    leaf = torch.zeros(num_tokens, requires_grad=True)
    rest, mask = torch.ones(num_tokens), torch.zeros(num_tokens, dtype=torch.bool)
    for loss in (
        policy_loss(leaf, rest, rest, mask, dual_clip=10.0, **CLIP),
        value_loss(leaf, rest, rest, mask, clip_low=0.5, clip_high=0.6),
        lm_loss(leaf, mask),
    ):
        assert loss.sum == 0 and loss.denominator == 0
        assert_finite(loss)
        loss.sum.backward()
        assert (leaf.grad == 0).all()


def test_loss_sums_do_not_depend_on_micro_batches():
    new, old, advantages, mask = random_batch(11, 40)
    whole = policy_loss(new, old, advantages, mask, dual_clip=10.0, **CLIP)
    parts = [
        policy_loss(new[piece], old[piece], advantages[piece], mask[piece], dual_clip=10.0, **CLIP)
        for piece in (slice(0, 13), slice(13, 14), slice(14, 40))
    ]
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
    assert sum(part.denominator for part in parts) == whole.denominator
    for name, (total, count) in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name][0] for part in parts), total)
        assert sum(part.metrics[name][1] for part in parts) == count


def test_old_logprobs_and_advantages_are_constants():
    leaves = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    policy_loss(*leaves, torch.ones(2), **CLIP).sum.backward()
    assert leaves[0].grad is not None and leaves[1].grad is None and leaves[2].grad is None


def test_lm_loss_is_minus_the_sum_of_logprobs():
    logprobs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    loss = lm_loss(logprobs, torch.tensor([1, 0, 1]))
    loss.sum.backward()
    assert loss.sum == 5.0 and loss.denominator == 2.0
    assert logprobs.grad.tolist() == [-1.0, 0.0, -1.0]


def test_loss_is_immutable():
    loss = lm_loss(torch.zeros(1), torch.ones(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.sum = torch.zeros(())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask": torch.ones(2)}, r"mask: expected.*\[3\].*got.*\[2\]"),
        ({"old_logprobs": torch.zeros(3).double()}, "old_logprobs: expected the same form as logprobs"),
        ({"logprobs": torch.zeros(3, dtype=torch.bfloat16)}, "logprobs: expected a 1-D float32 or float64"),
        ({"advantages": torch.zeros(3, 1)}, "advantages: expected a 1-D"),
        ({"clip_low": -0.1}, "clip_low: expected a finite number of at least 0"),
        ({"clip_high": float("nan")}, "clip_high: expected a finite number of at least 0"),
        ({"dual_clip": 0.0}, "dual_clip: expected a number above 1, or None"),
    ],
)
def test_clip_loss_rejects_bad_arguments_by_name(change: dict, message: str):
    fitting = {name: torch.zeros(3) for name in ("logprobs", "old_logprobs", "advantages", "mask")} | CLIP
    policy_loss(**fitting)
    with pytest.raises(ValueError, match=message):
        policy_loss(**(fitting | change))
