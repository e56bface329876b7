"""KL divergence from the reference policy: estimators, as a loss, as a penalty in the reward; adaptive coefficient.

Notation: tokens are drawn from pi (``logprobs``), ``d = log pi - log pi_ref``, and all three estimate
KL(pi || pi_ref), the reverse KL (Schulman, "Approximating KL divergence", 2020):

    k1 = d                    unbiased, may be negative
    k2 = d^2 / 2              biased, never negative
    k3 = exp(-d) - 1 + d      unbiased, never negative

Which one where, for tokens drawn from the policy that is trained:

- in the reward, k1: the policy gradient of a return that holds -k1 is the gradient of the reverse KL. With k3 it is
  E[grad log pi k3] = grad KL(pi || pi_ref) - grad KL(pi_ref || pi), whose leading terms cancel near pi_ref: almost no
  pull, and not towards the reference. k2 punishes a token that has become less likely like one that has become more
  likely. The configuration refuses both there.
- in the loss, k2: its gradient ``d * grad log pi`` is in expectation that of the reverse KL.
- in the loss, k3 (GRPO): ``(1 - pi_ref / pi) grad log pi`` is in expectation that of the *forward* KL(pi_ref || pi);
  near pi_ref the two agree.
- in the loss, k1 is no penalty at all: its gradient ``grad log pi`` is 0 in expectation and adds noise only. It is
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

_MAX_RELATIVE_ERROR = 0.2
"""The adaptive controller never sees a KL further from its target than this share."""


@register.kl_estimator("k1", places=("reward",))
def _k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d: unbiased, may be negative; the usual one in the reward."""
    return logprobs - reference_logprobs


@register.kl_estimator("k2", places=("loss",))
def _k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2: its gradient in the loss is that of KL(policy || reference)."""
    return 0.5 * (logprobs - reference_logprobs).square()


@register.kl_estimator("k3", places=("loss",))
def _k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative; the usual one in the loss."""
    # It grows like pi_ref / pi: where that is cut, so is the gradient.
    difference = (logprobs - reference_logprobs).clamp(min=-MAX_LOG_RATIO)
    # A rounding of expm1 may leave -1e-9 where the policies agree; the clamp keeps the gradient at 0 itself.
    return (torch.expm1(-difference) + difference).clamp(min=0.0)


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, kind: str, options: Mapping[str, Any] | None = None
) -> Tensor:
    """Estimate of KL(pi || pi_ref) on each token.

    Args:
        logprobs: [T] float32 or float64, of tokens drawn from pi; the gradient flows through them.
        reference_logprobs: [T] same dtype and device; taken as constants.
        kind: "k1", "k2" or "k3", see the module; another registered name, or package.module:function.
        options: of the estimator.

    Returns:
        [T].
    """
    check_float_vector("logprobs", logprobs)
    check_same_kind("reference_logprobs", reference_logprobs, "logprobs", logprobs)
    estimate = register.KL_ESTIMATORS.bind(kind, options)
    return estimate(logprobs=logprobs, reference_logprobs=reference_logprobs.detach())


def kl_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: str,
    coefficients: Tensor,
    aggregation: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
) -> Loss:
    """``coefficients * kl_estimate``, to be added to the policy's loss.

    A coefficient of 0 takes a token out altogether: samples without a KL term do not depend on the reference policy,
    whatever it says (Seed1.5-VL, arXiv 2505.07062).

    Args:
        logprobs: [T] float32 or float64, with gradient, of the current policy.
        reference_logprobs: [T] same dtype and device.
        mask: [T] 0/1 of any real dtype.
        kind: as for ``kl_estimate``; "k1" has no useful gradient, see the module.
        coefficients: [T] float32 or float64, constants: the KL coefficient of each token's sample.
        aggregation: [T] of ``token_coefficients``; None: every token counts alike.
        options: of the estimator.

    Returns:
        Loss. Its denominator counts all tokens in the mask (sums ``aggregation``), so that it is that of the policy's
        loss. Metric ``kl``: the estimate without coefficient over the tokens whose coefficient is not 0.
    """
    check_float_vector("logprobs", logprobs)
    check_same_kind("reference_logprobs", reference_logprobs, "logprobs", logprobs)
    check_mask(mask, "logprobs", logprobs)
    coefficients = check_factor("coefficients", coefficients, "logprobs", logprobs)
    inside = (mask != 0) & (coefficients != 0)
    active = mask * inside
    divergence = kl_estimate(keep(logprobs, inside), keep(reference_logprobs, inside), kind, options)
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
        logprobs, reference_logprobs: [T], same dtype and device; ``logprobs`` of the policy that drew the tokens.
        mask: [T] 0/1 of any real dtype: the tokens the policy generated.
        coefficients: [T] float32 or float64: the KL coefficient of each token's sample.
        kind: as for ``kl_estimate``; "k1" is the valid one, see the module.
        options: of the estimator.

    Returns:
        [T]; where the mask or the coefficient is 0, ``rewards`` unchanged, whatever the reference says there.
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
            coef: first coefficient, more than 0 (from 0 a product never leaves).
            target: KL of one response that is aimed at, in nats, more than 0.
            horizon: responses over which the coefficient may change by about a fifth, more than 0.
        """
        self.coef = _positive("coef", coef)
        self.target = _positive("target", target)
        self.horizon = _positive("horizon", horizon)

    def update(self, kl: float, num_samples: int) -> float:
        """Move the coefficient by one step's measurement; returns the new one.

        Args:
            kl: mean KL(pi || pi_ref) of a response (summed over its tokens) in this step, in nats.
            num_samples: responses it is the mean of, at least 0, below 5 * horizon.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl: expected a finite number, got {kl!r}; leave a step without a measurement out")
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
        """What a checkpoint keeps: the coefficient. Target and horizon come from the configuration."""
        return {"coef": self.coef}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on from what ``state`` returned."""
        if "coef" not in state:
            raise ValueError(f"state: expected the dict of AdaptiveKlController.state with 'coef', got {state!r}")
        self.coef = _positive("coef", state["coef"])


def _positive(name: str, value: float) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    return number
