"""Laws of the KL estimators, the KL loss and reward penalty, and the adaptive coefficient."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms import (
    AdaptiveKlController,
    kl_estimate,
    kl_loss,
    kl_penalized_rewards,
    token_coefficients,
    top_k_kl,
)
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged

KINDS = ["k1", "k2", "k3"]
REFERENCE = torch.tensor([0.3, 0.2, 0.4, 0.1], dtype=torch.float64)


def estimate_by_formula(logprob: float, reference: float, kind: str) -> float:
    d = logprob - reference
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def policy_logits() -> Tensor:
    return torch.tensor([0.3, -0.8, 0.1, 0.9], dtype=torch.float64, requires_grad=True)


def expected_gradient_of(kind: str) -> Tensor:
    """Gradient of the kind's loss with respect to the logits, as the exact expectation over tokens sampled from pi."""
    logits = policy_logits()
    logprobs = logits.log_softmax(0)
    probabilities = logprobs.exp().detach()
    loss = (probabilities * kl_estimate(logprobs, REFERENCE.log(), kind)).sum()
    return torch.autograd.grad(loss, logits)[0]


def gradient_of_divergence(*, reverse: bool) -> Tensor:
    logits = policy_logits()
    logprobs = logits.log_softmax(0)
    divergence = (
        (logprobs.exp() * (logprobs - REFERENCE.log())).sum()
        if reverse
        else (REFERENCE * (REFERENCE.log() - logprobs)).sum()
    )
    return torch.autograd.grad(divergence, logits)[0]


class TestEstimators:
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=30)
    @given(st.lists(st.tuples(st.floats(-15, 0), st.floats(-15, 0)), max_size=10))
    def test_equal_their_formulas(self, kind: str, pairs: list[tuple[float, float]]):
        new, reference = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
        assert_close(kl_estimate(new, reference, kind), [estimate_by_formula(*pair, kind) for pair in pairs], 1e-9)

    @pytest.mark.parametrize("kind", ["k1", "k3"])
    def test_k1_and_k3_are_unbiased(self, kind: str):
        logprobs = policy_logits().detach().log_softmax(0)
        divergence = (logprobs.exp() * (logprobs - REFERENCE.log())).sum()
        assert_close((logprobs.exp() * kl_estimate(logprobs, REFERENCE.log(), kind)).sum(), divergence.item())

    @given(st.floats(-0.01, 0.01), st.floats(-30, 0), st.sampled_from([torch.float32, torch.float64]))
    def test_k3_is_never_negative(self, difference: float, reference: float, dtype: torch.dtype):
        anchor = torch.tensor([reference], dtype=dtype)
        assert kl_estimate(anchor + difference, anchor, "k3") >= 0

    @given(st.floats(-1e-3, 1e-3))
    def test_k3_and_k2_agree_near_the_reference(self, difference: float):
        new, zero = torch.tensor([difference], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        gap = kl_estimate(new, zero, "k3") - kl_estimate(new, zero, "k2")
        # The next term of the series is d^3 / 6.
        assert gap.abs() <= abs(difference) ** 3 / 5 + 1e-18

    def test_k3_stays_finite_far_from_the_reference(self):
        new = torch.tensor([-500.0, 0.0, -0.5], requires_grad=True)
        estimate = kl_estimate(new, torch.tensor([0.0, -500.0, -0.5]), "k3")
        estimate.sum().backward()
        assert estimate.isfinite().all() and new.grad.isfinite().all()
        assert estimate[1] == 499.0 and estimate[2] == 0.0 and new.grad[2] == 0.0

    def test_reference_is_a_constant(self):
        new, reference = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
        kl_estimate(new, reference, "k2").sum().backward()
        assert new.grad.tolist() == [-1.0, -1.0] and reference.grad is None


class TestGradients:
    """Expected gradients, computed exactly by enumerating all tokens."""

    def test_k2_in_the_loss_has_the_gradient_of_the_reverse_kl(self):
        assert_close(expected_gradient_of("k2"), gradient_of_divergence(reverse=True))

    def test_k3_in_the_loss_has_the_gradient_of_the_forward_kl(self):
        assert_close(expected_gradient_of("k3"), gradient_of_divergence(reverse=False))
        assert (gradient_of_divergence(reverse=False) - gradient_of_divergence(reverse=True)).abs().max() > 0.01

    def test_k1_in_the_loss_has_no_gradient(self):
        assert_close(expected_gradient_of("k1"), torch.zeros(4))

    def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl(self):
        logits = policy_logits()
        logprobs = logits.log_softmax(0)
        ones = torch.ones(4, dtype=torch.float64)
        rewards = kl_penalized_rewards(0 * ones, logprobs.detach(), REFERENCE.log(), ones, ones)
        surrogate = -(logprobs.exp().detach() * rewards * logprobs).sum()
        assert_close(torch.autograd.grad(surrogate, logits)[0], gradient_of_divergence(reverse=True))


class TestKlLoss:
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=30)
    @given(batch=ragged())
    def test_equals_the_sum_of_weighted_estimates(self, kind: str, batch: Ragged):
        new, reference = batch.logprobs(), batch.logprobs()
        by_sequence = torch.where(batch.uniform_of_sequence() < 0.5, 0.0, batch.uniform_of_sequence())
        coefficients = by_sequence.repeat_interleave(batch.cu_seqlens.diff())
        leaf = new.clone().requires_grad_()
        loss = kl_loss(leaf, reference, batch.mask, kind=kind, coefficients=coefficients)
        expected, metric, active = 0.0, 0.0, 0
        gradient = torch.zeros(batch.num_tokens, dtype=torch.float64)
        for tokens, coefficient in zip(batch.counted(), by_sequence.tolist()):
            for t in tokens if coefficient else []:
                estimate, d = (
                    estimate_by_formula(float(new[t]), float(reference[t]), kind),
                    float(new[t] - reference[t]),
                )
                expected, metric, active = expected + coefficient * estimate, metric + estimate, active + 1
                gradient[t] = coefficient * {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[kind]
        assert_close(loss.sum, expected)
        assert_close(torch.autograd.grad(loss.sum, leaf)[0], gradient)
        assert loss.denominator == batch.mask.sum()
        assert_close(loss.metrics["kl"][0], metric)
        assert loss.metrics["kl"][1] == active

    @pytest.mark.parametrize("kind", KINDS)
    def test_samples_without_coefficient_ignore_the_reference(self, kind: str):
        new, coefficients = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([0.0, 1e-5])
        results = []
        for said in (-1.5, torch.nan, -torch.inf):
            loss = kl_loss(new, torch.tensor([said, -2.5]), torch.ones(2), kind=kind, coefficients=coefficients)
            (gradient,) = torch.autograd.grad(loss.sum, new)
            assert gradient[0] == 0
            results.append((loss.sum.item(), gradient.tolist(), loss.metrics["kl"][0].item()))
        assert results[0] == results[1] == results[2]

    @given(ragged())
    def test_sequence_means_divide_by_responses(self, batch: Ragged):
        new, reference = batch.logprobs(), batch.logprobs()
        aggregation = token_coefficients(batch.mask, batch.cu_seqlens, "sequence_mean", dtype=torch.float64)
        loss = kl_loss(
            new, reference, batch.mask, kind="k2", coefficients=0.1 * torch.ones_like(new), aggregation=aggregation
        )
        means = [
            sum(estimate_by_formula(float(new[t]), float(reference[t]), "k2") for t in tokens) / len(tokens)
            for tokens in batch.counted()
            if tokens
        ]
        assert_close(loss.sum, 0.1 * sum(means))
        assert_close(loss.denominator, float(len(means)))

    def test_empty_masks_give_zeros(self):
        for num_tokens in (0, 3):
            leaf, rest = torch.zeros(num_tokens, requires_grad=True), torch.ones(num_tokens)
            loss = kl_loss(leaf, rest, torch.zeros(num_tokens), kind="k3", coefficients=rest)
            loss.sum.backward()
            assert loss.sum == 0 and loss.denominator == 0 and (leaf.grad == 0).all()


class TestPenalizedRewards:
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=30)
    @given(batch=ragged())
    def test_equal_rewards_minus_the_estimate(self, kind: str, batch: Ragged):
        rewards, new, reference = batch.normal(junk=0.25), batch.logprobs(), batch.logprobs()
        coefficients = batch.normal(0.1, junk=torch.nan)
        expected = [
            float(rewards[t]) - float(coefficients[t]) * estimate_by_formula(float(new[t]), float(reference[t]), kind)
            if batch.mask[t]
            else 0.25
            for t in range(batch.num_tokens)
        ]
        assert_close(kl_penalized_rewards(rewards, new, reference, batch.mask, coefficients, kind), expected)

    def test_rewards_without_coefficient_are_bit_equal(self):
        rewards = torch.rand(3)
        unknown = torch.full((3,), torch.nan)
        assert torch.equal(kl_penalized_rewards(rewards, unknown, unknown, torch.ones(3), torch.zeros(3)), rewards)

    def test_carry_no_gradient(self):
        new = torch.zeros(2, requires_grad=True)
        assert not kl_penalized_rewards(torch.ones(2), new, torch.ones(2), torch.ones(2), torch.ones(2)).requires_grad


class TestAdaptiveController:
    @given(st.floats(1e-6, 1.0), st.floats(0.1, 50.0), st.lists(st.tuples(st.floats(-1, 200), st.integers(0, 9999))))
    def test_update_equals_its_formula(self, coef: float, target: float, steps: list[tuple[float, int]]):
        controller = AdaptiveKlController(coef, target, 10_000)
        for kl, num_samples in steps:
            coef *= 1 + max(-0.2, min(0.2, kl / target - 1)) * num_samples / 10_000
            assert controller.update(kl, num_samples) == controller.coef == pytest.approx(coef, rel=1e-12)

    def test_steers_towards_the_target(self):
        controller = AdaptiveKlController(0.1, 6.0, 1000)
        assert controller.update(6.0, 100) == 0.1
        assert controller.update(100.0, 100) == pytest.approx(0.1 * 1.02)
        assert controller.update(0.0, 100) == pytest.approx(0.1 * 1.02 * 0.98)

    def test_restored_controller_continues_identically(self):
        first, second = AdaptiveKlController(0.1, 6.0, 1000), AdaptiveKlController(0.7, 6.0, 1000)
        first.update(9.0, 64)
        second.load_state(first.state())
        assert first.update(3.0, 64) == second.update(3.0, 64)

    def test_kl_functions_reject_bad_arguments_by_name(self):
        for name, arguments in {"coef": (0.0, 6, 100), "target": (0.1, 0, 100), "horizon": (0.1, 6, -1)}.items():
            with pytest.raises(ValueError, match=f"{name}: expected a finite number above 0"):
                AdaptiveKlController(*arguments)
        controller = AdaptiveKlController(0.1, 6.0, 100)
        with pytest.raises(ValueError, match="kl: expected a finite number, got nan"):
            controller.update(math.nan, 10)
        with pytest.raises(ValueError, match=r"num_samples: expected less than 5 \* horizon = 500, got 500"):
            controller.update(1.0, 500)
        with pytest.raises(ValueError, match="state: expected the dict"):
            controller.load_state({})
        assert controller.coef == 0.1


def test_kl_functions_reject_bad_arguments_by_name():
    three = torch.zeros(3)
    with pytest.raises(ValueError, match="unknown KL estimator 'k4': expected one of k1, k2, k3, or an import path"):
        kl_estimate(three, three, "k4")
    with pytest.raises(ValueError, match="reference_logprobs: expected the same form as logprobs"):
        kl_loss(three, three.double(), three, kind="k3", coefficients=three)
    with pytest.raises(ValueError, match="coefficients: expected one value per token"):
        kl_loss(three, three, three, kind="k3", coefficients=torch.zeros(2))
    with pytest.raises(ValueError, match="coefficients: expected a 1-D float32 or float64 tensor, got float 0.1"):
        kl_penalized_rewards(three, three, three, three, 0.1)


class TestTopK:
    """The divergence over the reference's most likely tokens and the remainder, against the sum over the whole vocabulary."""

    def found(self, k: int, rows: int = 40, size: int = 11) -> tuple[Tensor, Tensor, Tensor]:
        """Logits with gradient, the divergence over k tokens [rows], and the whole divergence [rows]."""
        generator = torch.Generator().manual_seed(4)
        logits = torch.randn(rows, size, generator=generator, dtype=torch.float64).mul(2).requires_grad_()
        reference = torch.randn(rows, size, generator=generator, dtype=torch.float64).log_softmax(1)
        top, ids = reference.topk(k, 1)
        logprobs = logits.log_softmax(1)
        return logits, top_k_kl(logprobs.gather(1, ids), top), (logprobs.exp() * (logprobs - reference)).sum(1)

    def test_all_tokens_give_the_reverse_kl_and_its_gradient(self):
        logits, found, expected = self.found(k=11)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
        gradients = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (found, expected)]
        torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-10)

    def test_fewer_tokens_give_a_lower_bound_that_rises_with_them(self):
        values = [self.found(k)[1] for k in range(1, 12)]
        assert all((more >= fewer - 1e-12).all() for fewer, more in pairwise(values))
        assert (values[0] >= 0).all() and (values[0] < values[-1]).any()

    def test_the_remainder_is_one_event(self):
        """Merged tokens are one token of a smaller vocabulary."""
        logits, found, _ = self.found(k=3)
        generator = torch.Generator().manual_seed(4)
        torch.randn(40, 11, generator=generator, dtype=torch.float64)
        reference = torch.randn(40, 11, generator=generator, dtype=torch.float64).softmax(1)
        order, policy = reference.argsort(1, descending=True), logits.softmax(1)

        def merged(p: Tensor) -> Tensor:
            ordered = p.gather(1, order)
            return torch.cat([ordered[:, :3], ordered[:, 3:].sum(1, keepdim=True)], 1)

        p, q = merged(policy), merged(reference)
        expected = (p * (p.log() - q.log())).sum(1)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
        gradients = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (found, expected)]
        torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-10)

    def test_rounded_probabilities_of_a_certain_token_stay_finite(self):
        certain = torch.tensor([[0.0], [1e-7], [-1e9]], requires_grad=True)
        value = top_k_kl(certain, torch.tensor([[1e-7], [0.0], [0.0]]))
        value.sum().backward()
        assert value.isfinite().all() and certain.grad.isfinite().all()
