"""Divergence proximal policy optimization: trust regions of probabilities, not of ratios (DPPO, arXiv 2602.04879).

A ratio does not measure how far a policy has moved: a token of probability 1e-5 may double without consequence, a token
of 0.99 cannot grow by a fifth. DPPO removes a token's gradient once the policy has moved too far on that token in the
direction of its advantage. The distance is between two-way distributions: this token against all others.

The old policy should be the behavior policy (algorithm.correction.old_policy=rollout).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, Loss, keep, weighted_sum
from megatron_rl.algorithms.policy_loss import clip_fractions, detach_inputs, ratio_metrics
from megatron_rl.algorithms.shapes import check_not_negative, check_positive


@register.policy_loss("dppo_tv")
def dppo_tv_loss(  # noqa: PLR0913  public, and each number is a term of the formula
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
    coefficients: Tensor | None = None,
    max_ratio: float = 20.0,
) -> Loss:
    """-A sg[min(ratio, max_ratio)] log pi while the probability has moved by at most the clip range (DPPO, total variation).

    A token trains while ``p - p_old <= clip_high`` (A > 0) or ``p - p_old >= -clip_low`` (A <= 0).

    Args:
        logprobs, old_logprobs, advantages, mask, weights, coefficients: as for ``policy_loss``.
        clip_low, clip_high: largest total variation, at least 0; the paper uses 0.15 and 0.2.
        max_ratio: largest factor of a token, more than 0.

    Returns:
        Loss per token. Metrics as for ``policy_loss``, without dual clip; clip fractions count the tokens without gradient.
    """
    return _masked_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        _total_variation,
        clip_low,
        clip_high,
        max_ratio,
        weights,
        coefficients,
    )


@register.policy_loss("dppo_kl")
def dppo_kl_loss(  # noqa: PLR0913  as above
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
    coefficients: Tensor | None = None,
    max_ratio: float = 20.0,
) -> Loss:
    """``dppo_tv_loss`` with the KL divergence (old || new) of the two-way distributions as the distance (DPPO, binary KL).

    Args:
        logprobs, old_logprobs, advantages, mask, weights, coefficients, max_ratio: as for ``dppo_tv_loss``.
        clip_low, clip_high: largest divergence in nats, at least 0; the paper uses 0.05.
    """
    return _masked_loss(
        logprobs, old_logprobs, advantages, mask, _binary_kl, clip_low, clip_high, max_ratio, weights, coefficients
    )


def _total_variation(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs.exp() - old_logprobs.exp()).abs()


def _binary_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)); inf if p is 1 and p_old is not."""
    old, rest, old_rest = old_logprobs.exp(), -torch.expm1(logprobs), -torch.expm1(old_logprobs)
    # xlogy, because 0 log 0 must be 0: a token of old probability 1 leaves nothing for the others.
    return old * (old_logprobs - logprobs) + torch.xlogy(old_rest, old_rest) - torch.xlogy(old_rest, rest)


def _masked_loss(  # noqa: PLR0913  each number is a term of the formula
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    compute_distance: Callable[[Tensor, Tensor], Tensor],
    clip_low: float,
    clip_high: float,
    max_ratio: float,
    weights: Tensor | None,
    coefficients: Tensor | None,
) -> Loss:
    clip_low, clip_high = check_not_negative("clip_low", clip_low), check_not_negative("clip_high", clip_high)
    check_positive("max_ratio", max_ratio)
    old_logprobs, advantages = detach_inputs(logprobs, old_logprobs, advantages, mask)
    kept = keep(logprobs, mask)
    current = kept.detach()
    log_ratio = (current - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # float64, because 1 - p of a likely token has few significant digits in float32.
    distance = compute_distance(current.double(), old_logprobs.double())
    too_high = (advantages > 0) & (current > old_logprobs) & (distance > clip_high)
    too_low = (advantages <= 0) & (current < old_logprobs) & (distance > clip_low)
    ratio = log_ratio.exp()
    # The ratio is computed from detached log-probs, so the gradient flows through ``kept`` only.
    token_loss = keep(-advantages * ratio.clamp(max=max_ratio) * kept, ~(too_high | too_low))
    metrics = ratio_metrics(log_ratio, ratio, mask, clip_fractions(too_low, too_high))
    return Loss(*weighted_sum(token_loss, mask, weights, coefficients), metrics)
