"""KL divergence from the reference policy: estimators, as a loss, as a penalty in the reward; adaptive coefficient.

Notation: tokens are sampled from pi (``logprobs``) and ``d = log pi - log pi_ref``. Three estimators of the reverse KL,
KL(pi || pi_ref) (Schulman, "Approximating KL divergence", 2020):

    k1 = d                    unbiased, may be negative
    k2 = d^2 / 2              biased, never negative
    k3 = exp(-d) - 1 + d      unbiased, never negative

Choice of the estimator, for tokens sampled from the policy in training:

- In the reward, k1: the policy gradient of a return that contains -k1 is the gradient of the reverse KL. With k3 it is
  E[grad log pi k3] = grad KL(pi || pi_ref) - grad KL(pi_ref || pi), whose leading terms cancel near pi_ref: the pull is
  weak and not towards the reference. k2 penalizes a token that became less likely as much as one that became more
  likely. The configuration refuses k2 and k3 in the reward.
- In the loss, k2: the expectation of its gradient ``d * grad log pi`` is the gradient of the reverse KL.
- In the loss, k3 (GRPO): the expectation of ``(1 - pi_ref / pi) grad log pi`` is the gradient of the *forward*
  KL(pi_ref || pi); near pi_ref both gradients agree.
- In the loss, k1 does not penalize: its gradient ``grad log pi`` is 0 in expectation and only adds noise. k1 is
  accepted, for comparison and logging.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, Loss, keep, mask_total, masked_sum
from megatron_rl.algorithms.shapes import (
    check_factor,
    check_float_vector,
    check_mask,
    check_not_negative,
    check_same_kind,
)

_LEAST_REMAINDER = 1e-6
_MAX_RELATIVE_ERROR = 0.2
"""Bound on the relative distance of the KL from its target, as the adaptive controller uses it."""


@register.kl_estimator("k1", places=("reward",))
def _k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d: unbiased, may be negative; the usual estimator in the reward."""
    return logprobs - reference_logprobs


@register.kl_estimator("k2", places=("loss",))
def _k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased, never negative; as a loss, its gradient is the gradient of KL(policy || reference)."""
    return 0.5 * (logprobs - reference_logprobs).square()


@register.kl_estimator("k3", places=("loss",))
def _k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative; the usual estimator in the loss."""
    # k3 grows like pi_ref / pi; the clamp bounds it and removes the gradient beyond the bound.
    difference = (logprobs - reference_logprobs).clamp(min=-MAX_LOG_RATIO)
    # Rounding in expm1 may give -1e-9 where the policies agree; the clamp keeps the gradient at exactly 0 there.
    return (torch.expm1(-difference) + difference).clamp(min=0.0)


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, kind: str, options: Mapping[str, Any] | None = None
) -> Tensor:
    """Estimate of KL(pi || pi_ref) on each token.

    Args:
        logprobs: [T] float32 or float64, of tokens sampled from pi; the gradient flows through them.
        reference_logprobs: [T] same dtype and device; taken as constants.
        kind: "k1", "k2" or "k3" (see the module's docstring), another registered name, or package.module:function.
        options: keyword arguments of the estimator.

    Returns:
        [T].
    """
    check_float_vector("logprobs", logprobs)
    check_same_kind("reference_logprobs", reference_logprobs, "logprobs", logprobs)
    estimate = register.KL_ESTIMATORS.bind(kind, options)
    return estimate(logprobs=logprobs, reference_logprobs=reference_logprobs.detach())


def top_k_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(pi || pi_ref) of each token's whole distribution, of which k probabilities are known and the others are one event.

    ``sum_i p_i (log p_i - log q_i) + r (log r - log s)`` with the remainders r = 1 - sum p_i and s = 1 - sum q_i: a lower bound of
    the divergence, and equal to it if the k tokens are the whole vocabulary. Remainders below 1e-6 count as 1e-6, because
    rounding leaves no more of a float32 sum of probabilities.

    Args:
        logprobs: [T, k] float32 or float64, with gradient: of the policy, on the reference's k most likely tokens.
        reference_logprobs: [T, k] same dtype and device, constants.

    Returns:
        [T].
    """
    known, reference = logprobs.exp(), reference_logprobs.detach()
    rest, reference_rest = ((1.0 - p.sum(-1)).clamp(min=_LEAST_REMAINDER) for p in (known, reference.exp()))
    return (known * (logprobs - reference)).sum(-1) + rest * (rest.log() - reference_rest.log())


def kl_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: str,
    coefficients: Tensor,
    aggregation: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
    divergence: Tensor | None = None,
) -> Loss:
    """``coefficients * kl_estimate``, which the caller adds to the policy's loss.

    A coefficient of 0 removes a token entirely: samples without a KL term do not depend on the reference policy, even if
    its log-probs are inf or NaN (Seed1.5-VL, arXiv 2505.07062).

    Args:
        logprobs: [T] float32 or float64, with gradient, of the current policy.
        reference_logprobs: [T] same dtype and device.
        mask: [T] 0/1 of any real dtype.
        kind: as for ``kl_estimate``; "k1" has no useful gradient (see the module's docstring).
        coefficients: [T] float32 or float64, constants: the KL coefficient of each token's sample.
        aggregation: [T] from ``token_coefficients``; None gives every token the same weight.
        options: keyword arguments of the estimator.
        divergence: [T] the divergence of each token with gradient (``top_k_kl``), in place of the estimate.

    Returns:
        Loss with the denominator of the policy's loss: the count of all tokens in the mask, or the sum of
        ``aggregation``. Metric ``kl``: the mean estimate, without coefficient, over the tokens whose coefficient is not 0.
    """
    check_float_vector("logprobs", logprobs)
    check_same_kind("reference_logprobs", reference_logprobs, "logprobs", logprobs)
    check_mask(mask, "logprobs", logprobs)
    coefficients = check_factor("coefficients", coefficients, "logprobs", logprobs)
    inside = (mask != 0) & (coefficients != 0)
    active = mask * inside
    # Masked before the estimate, because inf or NaN of the reference times a coefficient of 0 would be NaN.
    if divergence is None:
        divergence = kl_estimate(keep(logprobs, inside), keep(reference_logprobs, inside), kind, options)
    divergence = keep(divergence, inside)
    token_loss = divergence * keep(coefficients, inside)
    denominator = mask_total(mask, logprobs.dtype)
    if aggregation is not None:
        aggregation = keep(check_factor("aggregation", aggregation, "logprobs", logprobs), mask)
        token_loss = token_loss * aggregation
        denominator = masked_sum(aggregation, mask)
    metrics = {"kl": (masked_sum(divergence.detach(), active), mask_total(active, logprobs.dtype))}
    return Loss(masked_sum(token_loss, active), denominator, metrics)


@torch.no_grad()
def kl_penalized_rewards(
    rewards: Tensor,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    coefficients: Tensor,
    kind: str = "k1",
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Token rewards minus the KL penalty, ``r_t - coefficients_t kl_t`` (InstructGPT, arXiv 2203.02155).

    Args:
        rewards: [T] float32 or float64.
        logprobs, reference_logprobs: [T], same dtype and device; ``logprobs`` are of the policy that sampled the tokens.
        mask: [T] 0/1 of any real dtype: the tokens the policy generated.
        coefficients: [T] float32 or float64: the KL coefficient of each token's sample.
        kind: as for ``kl_estimate``; only "k1" has the right gradient (see the module's docstring).
        options: keyword arguments of the estimator.

    Returns:
        [T]; ``rewards`` unchanged where the mask or the coefficient is 0, even if the reference is inf or NaN there.
    """
    check_float_vector("rewards", rewards)
    check_same_kind("logprobs", logprobs, "rewards", rewards)
    check_same_kind("reference_logprobs", reference_logprobs, "rewards", rewards)
    check_mask(mask, "rewards", rewards)
    coefficients = check_factor("coefficients", coefficients, "rewards", rewards)
    inside = (mask != 0) & (coefficients != 0)
    divergence = kl_estimate(keep(logprobs, inside), keep(reference_logprobs, inside), kind, options)
    penalty = keep(coefficients, inside) * divergence
    return torch.where(inside, rewards - penalty, rewards)


class AdaptiveKlController:
    """The KL coefficient that keeps the divergence near a target (Ziegler et al., arXiv 1909.08593, section 2.2).

    ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon`` after each step.
    """

    def __init__(self, coef: float, target: float, horizon: float):
        """
        Args:
            coef: initial coefficient, more than 0 (updates multiply, so 0 would stay 0).
            target: desired KL per response, in nats, more than 0.
            horizon: responses over which the coefficient may change by about a fifth, more than 0.
        """
        self.coef = _positive("coef", coef)
        self.target = _positive("target", target)
        self.horizon = _positive("horizon", horizon)

    def update(self, kl: float, num_samples: int) -> float:
        """Adjust the coefficient by one step's measurement; returns the new coefficient.

        Args:
            kl: mean KL(pi || pi_ref) per response (summed over its tokens) in this step, in nats.
            num_samples: number of responses in the mean, at least 0, below 5 * horizon.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl: expected a finite number, got {kl!r}; skip steps without a measurement")
        share = check_not_negative("num_samples", num_samples) / self.horizon
        if share * _MAX_RELATIVE_ERROR >= 1.0:
            raise ValueError(
                f"num_samples: expected less than 5 * horizon = {5 * self.horizon:g}, got {num_samples}: "
                "one step could turn the coefficient negative; choose a longer horizon"
            )
        error = min(max(kl / self.target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        self.coef *= 1.0 + error * share
        return self.coef

    def state(self) -> dict[str, float]:
        """The state for a checkpoint: the coefficient. Target and horizon come from the configuration."""
        return {"coef": self.coef}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore the state that ``state`` returned."""
        if "coef" not in state:
            raise ValueError(f"state: expected the dict of AdaptiveKlController.state with 'coef', got {state!r}")
        self.coef = _positive("coef", state["coef"])


def _positive(name: str, value: float) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    return number
