"""Losses of the policy: clipped surrogate with dual clip, and the language-model loss on positive examples.

Masks are 0/1 tensors of any real dtype; a fractional float mask weighs loss, denominator and metrics alike.
"""

import math

import torch
from torch import Tensor

from megatron_rl.algorithms.checks import check_float_vector, check_mask, check_not_negative, check_same_kind
from megatron_rl.algorithms.loss import Loss, keep, mask_total, masked_sum

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio says only that the two policies have nothing in common."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Loss:
    """PPO's clipped surrogate with separate clip ranges and a bound for negative advantages.

    ``ratio = exp(clamp(logprobs - old_logprobs, -20, 20))``, the plain log difference; then, token by token,
    ``max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))``, and with ``dual_clip`` = c at most ``c |A|``, which
    only bites for A < 0 (clip-higher: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729).

    Args:
        logprobs: [T] float32 or float64, with gradient.
        old_logprobs, advantages: [T], same dtype and device; taken as constants.
        mask: [T] 1 for the tokens to train.
        clip_low, clip_high: at least 0.
        dual_clip: more than 1, or None for no bound.

    Returns:
        Loss per token. Metrics: ``clip_fraction_low`` (ratio too small with A < 0), ``clip_fraction_high`` (ratio too
        large with A > 0), ``clip_fraction`` (both), ``dual_clip_fraction``, ``approx_kl_k1`` and ``approx_kl_k3``
        (estimates of KL(old || new)), ``ratio_mean``; maximum ``ratio_max``.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
    """
    check_float_vector("logprobs", logprobs)
    check_same_kind("old_logprobs", old_logprobs, "logprobs", logprobs)
    check_same_kind("advantages", advantages, "logprobs", logprobs)
    check_mask(mask, "logprobs", logprobs)
    clip_low = check_not_negative("clip_low", clip_low)
    clip_high = check_not_negative("clip_high", clip_high)
    if dual_clip is not None and not (math.isfinite(dual_clip) and dual_clip > 1.0):
        raise ValueError(f"dual_clip: expected a number above 1, or None for no bound, got {dual_clip!r}")

    advantages = keep(advantages.detach(), mask)
    log_ratio = keep(logprobs, mask) - keep(old_logprobs.detach(), mask)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = torch.maximum(unclipped, clipped)
    bounded = torch.zeros_like(mask, dtype=torch.bool)
    if dual_clip is not None:
        bound = advantages.abs() * dual_clip
        bounded = (token_loss > bound) & (advantages < 0)
        token_loss = torch.minimum(token_loss, bound)

    with torch.no_grad():
        denominator = mask_total(mask, logprobs.dtype)
        is_clipped = clipped > unclipped
        per_token = {
            "clip_fraction": is_clipped,
            "clip_fraction_low": is_clipped & (advantages < 0),
            "clip_fraction_high": is_clipped & (advantages > 0),
            "dual_clip_fraction": bounded,
            "approx_kl_k1": -log_ratio,
            "approx_kl_k3": torch.expm1(log_ratio) - log_ratio,
            "ratio_mean": ratio,
        }
        metrics = {name: (masked_sum(value.to(ratio.dtype), mask), denominator) for name, value in per_token.items()}
        # One more entry, so that an empty batch has a maximum: 0, below any ratio.
        ratio_max = torch.nn.functional.pad(keep(ratio, mask), (0, 1)).amax()
    return Loss(masked_sum(token_loss, mask), denominator, metrics, {"ratio_max": ratio_max})


def lm_loss(logprobs: Tensor, mask: Tensor) -> Loss:
    """Negative log-likelihood of the tokens in the mask: the loss on positive examples (VAPO, arXiv 2504.05118).

    The caller's mask holds only tokens of responses verified as correct, so the denominator counts those alone.

    Args:
        logprobs: [T] float32 or float64, with gradient, of the current policy.
        mask: [T] 1 for the tokens to learn.
    """
    check_float_vector("logprobs", logprobs)
    check_mask(mask, "logprobs", logprobs)
    return Loss(-masked_sum(logprobs, mask), mask_total(mask, logprobs.dtype))
