"""Laws of GSPO, CISPO and of the per-token factors, against Python loops written from the formulas."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms import (
    cispo_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    gmpo_loss,
    gspo_loss,
    loss_denominator,
    policy_loss,
    sapo_loss,
    token_coefficients,
)
from megatron_rl.algorithms.loss import Loss
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
BOUNDS = torch.tensor([0, 2, 2, 5])


def loss_and_gradient(loss: Loss, leaf: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss.sum, leaf)
    return loss.sum, gradient


def spread(batch: Ragged, per_sequence: Tensor) -> Tensor:
    return per_sequence.repeat_interleave(batch.cu_seqlens.diff())


class TestGspo:
    @given(ragged(), st.floats(1e-4, 0.9), st.floats(1e-4, 2.0))
    def test_is_the_clipped_ratio_of_whole_sequences(self, batch: Ragged, clip_low: float, clip_high: float):
        new, old = batch.logprobs(), batch.logprobs()
        outcomes = batch.uniform_of_sequence() - 0.5
        loss = gspo_loss(
            new, old, spread(batch, outcomes), batch.mask, batch.cu_seqlens, clip_low=clip_low, clip_high=clip_high
        )
        expected, num_sequences = 0.0, 0
        for tokens, advantage in zip(batch.counted(), outcomes.tolist()):
            if tokens:
                mean = sum(float(new[t] - old[t]) for t in tokens) / len(tokens)
                ratio = math.exp(min(mean, 10.0))
                clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
                expected -= min(ratio * advantage, clipped * advantage)
                num_sequences += 1
        assert_close(loss.sum, expected)
        assert loss.denominator == num_sequences
        assert loss.denominator == loss_denominator(batch.mask, batch.cu_seqlens, "sequence_mean")

    @given(ragged())
    def test_token_form_has_the_gradient_of_the_sequence_form(self, batch: Ragged):
        new, old = batch.logprobs(junk=0.0).requires_grad_(), batch.logprobs(junk=0.0)
        outcomes = batch.uniform_of_sequence() - 0.5
        loss = gspo_loss(new, old, spread(batch, outcomes), batch.mask, batch.cu_seqlens, **CLIP)
        total = (new * 0.0).sum()
        for tokens, advantage in zip(batch.counted(), outcomes):
            if tokens:
                ratio = (new - old)[tokens].mean().exp()
                total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (expected,) = torch.autograd.grad(total, new)
        assert_close(loss_and_gradient(loss, new)[1], expected)

    def test_only_counted_tokens_get_a_gradient(self):
        new = torch.tensor([-1.0, -2.0, -0.5, -0.7, -3.0], requires_grad=True)
        mask = torch.tensor([1, 1, 0, 1, 1])
        gspo_loss(new, new.detach(), torch.ones(5), mask, BOUNDS, **CLIP).sum.backward()
        torch.testing.assert_close(new.grad, torch.tensor([-0.5, -0.5, 0.0, -0.5, -0.5]))

    def test_advantages_may_differ_between_tokens(self):
        new = torch.tensor([-1.0, -2.0], requires_grad=True)
        loss = gspo_loss(new, new.detach(), torch.tensor([1.0, -3.0]), torch.ones(2), torch.tensor([0, 2]), **CLIP)
        loss.sum.backward()
        assert loss.sum == 1.0 and new.grad.tolist() == [-0.5, 1.5]

    def test_mean_log_ratio_is_clamped_to_ten(self):
        loss = gspo_loss(
            torch.tensor([40.0]), torch.zeros(1), -torch.ones(1), torch.ones(1), torch.tensor([0, 1]), **CLIP
        )
        assert loss.sum == pytest.approx(math.exp(10.0), rel=1e-6)
        assert loss.metrics["ratio_mean"][0] == pytest.approx(math.exp(10.0), rel=1e-6)

    def test_ratio_mean_is_over_sequence_ratios(self):
        log_ratio = torch.tensor([0.5, -0.1, -0.9, -0.9, -0.9], dtype=torch.float64)
        advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
        metrics = gspo_loss(
            log_ratio, torch.zeros(5).double(), advantages, torch.ones(5), BOUNDS, clip_low=0.2, clip_high=0.1
        ).metrics
        sums = {name: float(total) for name, (total, _) in metrics.items()}
        assert sums["clip_fraction_high"] == 2 and sums["clip_fraction_low"] == 3 and sums["clip_fraction"] == 5
        assert sums["ratio_mean"] == pytest.approx(2 * math.exp(0.2) + 3 * math.exp(-0.9))
        assert sums["approx_kl_k1"] == pytest.approx(-float(log_ratio.sum()))


class TestCispo:
    @given(ragged(), st.floats(0.0, 2.0), st.floats(0.0, 5.0))
    def test_is_the_weighted_log_likelihood(self, batch: Ragged, clip_low: float, clip_high: float):
        new, old, advantages = batch.logprobs(), batch.logprobs(), batch.normal()
        leaf = new.clone().requires_grad_()
        loss = cispo_loss(leaf, old, advantages, batch.mask, clip_low=clip_low, clip_high=clip_high)
        expected, gradient = 0.0, [0.0] * batch.num_tokens
        for t in (t for tokens in batch.counted() for t in tokens):
            weight = min(max(math.exp(float(new[t] - old[t])), 1 - clip_low), 1 + clip_high)
            expected -= weight * float(advantages[t]) * float(new[t])
            gradient[t] = -weight * float(advantages[t])
        total, actual_gradient = loss_and_gradient(loss, leaf)
        assert_close(total, expected)
        assert_close(actual_gradient, gradient)
        assert loss.denominator == batch.mask.sum()

    @given(st.floats(-6, 6), st.sampled_from([-1.0, 1.0]))
    def test_no_token_loses_its_gradient(self, log_ratio: float, advantage: float):
        new = torch.tensor([log_ratio], requires_grad=True)
        arguments = (torch.zeros(1), torch.tensor([advantage]), torch.ones(1))
        _, gradient = loss_and_gradient(cispo_loss(new, *arguments, clip_low=1.0, clip_high=0.2), new)
        assert gradient * advantage < 0

    def test_clip_high_is_a_distance_from_one(self):
        """The cap epsilon_high = 5 of other trainers is clip_high = 4."""
        loss = cispo_loss(
            torch.tensor([3.0]), torch.zeros(1), torch.ones(1), torch.ones(1), clip_low=1.0, clip_high=4.0
        )
        assert loss.sum == -15.0

    @pytest.mark.parametrize("clip_low", [1.0, 10.0])
    def test_clip_low_of_one_or_more_disables_the_lower_bound(self, clip_low: float):
        new = torch.tensor([-8.0], dtype=torch.float64)
        rest = (torch.zeros(1).double(), torch.ones(1).double(), torch.ones(1))
        assert_close(cispo_loss(new, *rest, clip_low=clip_low, clip_high=4.0).sum, 8.0 * math.exp(-8.0))

    def test_clip_fractions_count_ratios_outside_the_range(self):
        ratios = torch.tensor([0.5, 0.9, 1.1, 3.0, 4.0])
        metrics = cispo_loss(
            ratios.log(), torch.zeros(5), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), torch.ones(5), **CLIP
        ).metrics
        sums = {name: float(total) for name, (total, _) in metrics.items()}
        assert sums["clip_fraction_low"] == 1 and sums["clip_fraction_high"] == 2 and sums["clip_fraction"] == 3
        assert "dual_clip_fraction" not in sums


LOSSES = {
    "policy": partial(policy_loss, dual_clip=3.0, **CLIP),
    "gspo": partial(gspo_loss, **CLIP),
    "cispo": partial(cispo_loss, **CLIP),
    "sapo": sapo_loss,
    "gmpo": partial(gmpo_loss, **CLIP),
    "dppo_tv": partial(dppo_tv_loss, **CLIP),
    "dppo_kl": partial(dppo_kl_loss, **CLIP),
}


def call(name: str, batch: Ragged, new: Tensor, old: Tensor, advantages: Tensor, **factors: Tensor) -> Loss:
    bounds = (batch.cu_seqlens,) if name in ("gspo", "gmpo") else ()
    return LOSSES[name](new, old, advantages, batch.mask, *bounds, **factors)


@pytest.mark.parametrize("name", LOSSES)
class TestEveryLoss:
    @given(batch=ragged())
    def test_weights_multiply_token_losses_and_keep_the_denominator(self, name: str, batch: Ragged):
        """The decoupled objective of three policies: -E[w min(r A, clip(r) A)]."""
        new, old, advantages, weights = batch.logprobs(), batch.logprobs(), batch.normal(), batch.normal().abs()
        weighted = call(name, batch, new, old, advantages, weights=weights)
        # Equivalent, because a non-negative weight may multiply the advantage instead.
        moved = call(name, batch, new, old, torch.where(batch.mask, weights * advantages, 0.0))
        assert_close(weighted.sum, moved.sum.item())
        plain = call(name, batch, new, old, advantages)
        assert weighted.denominator == plain.denominator
        assert weighted.metrics.keys() == plain.metrics.keys()

    @given(batch=ragged())
    def test_weights_of_one_keep_the_loss_bit_equal(self, name: str, batch: Ragged):
        for dtype in (torch.float32, torch.float64):
            new, old, advantages = (x.to(dtype) for x in (batch.logprobs(), batch.logprobs(), batch.normal()))
            new.requires_grad_()
            plain = loss_and_gradient(call(name, batch, new, old, advantages), new)
            ones = torch.where(batch.mask, 1.0, torch.nan)
            weighted = loss_and_gradient(call(name, batch, new, old, advantages, weights=ones), new)
            assert torch.equal(plain[0], weighted[0]) and torch.equal(plain[1], weighted[1])
            assert plain[0].dtype == dtype

    def test_factors_are_constants(self, name: str):
        batch = Ragged(BOUNDS, torch.ones(5, dtype=torch.bool), torch.Generator().manual_seed(0))
        leaves = [torch.rand(5, requires_grad=True) for _ in range(4)]
        call(name, batch, *leaves[:3], weights=leaves[3]).sum.backward()
        assert [leaf.grad is not None for leaf in leaves] == [True, False, False, False]

    @pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
    def test_masked_entries_reach_neither_loss_nor_gradient(self, name: str, poison: float):
        mask = torch.tensor([True, False, False, True, True])
        batch = Ragged(BOUNDS, mask, torch.Generator().manual_seed(0))
        results = []
        for filler in (0.0, poison):
            new, old, advantages, weights = (
                torch.tensor([-1.0, filler, filler, -0.5, -2.0]) * scale for scale in (1.0, 1.1, -1.0, -1.0)
            )
            new.requires_grad_()
            loss = call(name, batch, new, old, advantages, weights=weights)
            results.append(loss_and_gradient(loss, new))
            numbers = [loss.denominator, *(x for pair in loss.metrics.values() for x in pair)]
            assert all(bool(number.isfinite()) for number in numbers)
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])

    @pytest.mark.parametrize("lengths", [[], [0], [0, 0], [2, 0, 1]])
    def test_batches_without_trained_tokens_give_finite_zeros(self, name: str, lengths: list[int]):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        batch = Ragged(bounds, torch.zeros(sum(lengths), dtype=torch.bool), torch.Generator())
        leaf = torch.zeros(sum(lengths), requires_grad=True)
        rest = torch.ones(sum(lengths))
        loss = call(name, batch, leaf, rest, rest, weights=rest)
        assert loss.sum == 0 and loss.denominator == 0 and loss.metrics["ratio_mean"][0] == 0
        loss.sum.backward()
        assert (leaf.grad == 0).all()

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"weights": torch.ones(4)}, "weights: expected one value per token"),
            ({"weights": torch.ones(5, dtype=torch.int64)}, "weights: expected a 1-D float32 or float64"),
            ({"clip_low": -1.0}, "clip_low: expected a finite number of at least 0"),
            ({"clip_high": math.inf}, "clip_high: expected a finite number of at least 0"),
        ],
    )
    def test_policy_losses_reject_bad_arguments_by_name(self, name: str, change: dict, message: str):
        if name == "sapo" and "weights" not in change:
            return  # sapo has no clip range
        batch = Ragged(BOUNDS, torch.ones(5, dtype=torch.bool), torch.Generator())
        with pytest.raises(ValueError, match=message):
            call(name, batch, torch.zeros(5), torch.zeros(5), torch.zeros(5), **change)


@pytest.mark.parametrize("name", ["policy", "cispo"])
@given(batch=ragged())
def test_sequence_mean_of_a_policy_loss_equals_brute_force(name: str, batch: Ragged):
    new, old, advantages = batch.logprobs(), batch.logprobs(), batch.normal()
    coefficients = token_coefficients(batch.mask, batch.cu_seqlens, "sequence_mean", dtype=torch.float64)
    loss = call(name, batch, new, old, advantages, coefficients=coefficients)
    expected = 0.0
    for tokens in batch.counted():
        if tokens:
            alone = LOSSES[name](new[tokens], old[tokens], advantages[tokens], torch.ones(len(tokens)))
            expected += float(alone.sum) / len(tokens)
    assert_close(loss.sum, expected)


def test_policy_loss_accepts_factors_of_either_precision():
    new, ones = torch.rand(3, dtype=torch.float64), torch.ones(3)
    factors = {"weights": torch.full((3,), 0.5), "coefficients": torch.full((3,), 2.0)}
    loss = policy_loss(new, new, ones.double(), ones, **factors, **CLIP)
    assert loss.sum == -3.0 and loss.sum.dtype == torch.float64 and loss.denominator == 6.0
