"""Losses of the policy: PPO's clipped surrogate, GSPO, CISPO, and the language-model loss on positive examples.

``dppo``, ``gmpo`` and ``sapo`` have their own files and share the argument checks and metrics of this one.

Masks are 0/1 tensors of any real dtype; a fractional float mask weights loss, denominator and metrics equally.

Two kinds of constant per-token factors enter a loss. ``weights`` correct for samples of another policy (see
``mismatch_correction``) and leave the denominator unchanged. ``coefficients`` define how tokens are averaged (see
``token_coefficients``) and sum up to the denominator. Metrics are means over tokens and ignore both.
"""

import math

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.aggregation import counted_sequences, token_coefficients
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, Loss, keep, mask_total, masked_sum, weighted_sum
from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
from megatron_rl.algorithms.shapes import (
    check_cu_seqlens,
    check_float_vector,
    check_mask,
    check_not_negative,
    check_same_kind,
)

_MAX_SEQUENCE_LOG_RATIO = 10.0
"""GSPO's upper bound on the mean log ratio of a response, as in the public implementations."""


@register.policy_loss("clip")
def policy_loss(  # noqa: PLR0913  public, and each number is a term of the formula
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> Loss:
    """PPO's clipped surrogate with separate clip ranges and a bound for negative advantages.

    ``ratio = exp(clamp(logprobs - old_logprobs, -20, 20))``; the loss of a token is
    ``max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))``. With ``dual_clip`` = c it is at most ``c |A|``, which
    only takes effect for A < 0 (clip-higher: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729). With ``weights``
    made from pi_old / mu this is the decoupled loss of three policies (arXiv 2110.00641).

    Args:
        logprobs: [T] float32 or float64, with gradient.
        old_logprobs, advantages: [T], same dtype and device; taken as constants.
        mask: [T] 1 for the tokens to train.
        clip_low, clip_high: at least 0.
        dual_clip: more than 1, or None for no bound.
        weights: [T] float32 or float64, taken as constants; multiply the tokens' losses. None: 1.
        coefficients: [T] like ``weights``; multiply the tokens' losses and make up the denominator. None: 1.

    Returns:
        Loss per token. Metrics: ``clip_fraction_low`` (ratio too small with A < 0), ``clip_fraction_high`` (ratio too
        large with A > 0), ``clip_fraction`` (both), ``dual_clip_fraction``, ``approx_kl_k1`` and ``approx_kl_k3``
        (estimates of KL(old || new)), ``ratio_mean``.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
    """
    old_logprobs, advantages = detach_inputs(logprobs, old_logprobs, advantages, mask)
    clip_low = check_not_negative("clip_low", clip_low)
    clip_high = check_not_negative("clip_high", clip_high)
    if dual_clip is not None and not (math.isfinite(dual_clip) and dual_clip > 1.0):
        raise ValueError(f"dual_clip: expected a number above 1, or None for no bound, got {dual_clip!r}")

    log_ratio = (keep(logprobs, mask) - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    token_loss, is_clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    bounded = torch.zeros_like(mask, dtype=torch.bool)
    if dual_clip is not None:
        bound = advantages.abs() * dual_clip
        bounded = (token_loss > bound) & (advantages < 0)
        token_loss = torch.minimum(token_loss, bound)
    fractions = clip_fractions(is_clipped & (advantages < 0), is_clipped & (advantages > 0))
    metrics = ratio_metrics(log_ratio, ratio, mask, {**fractions, "dual_clip_fraction": bounded})
    return Loss(*weighted_sum(token_loss, mask, weights, coefficients), metrics)


@register.policy_loss("gspo", averages="sequence_mean")
def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
) -> Loss:
    """Group sequence policy optimization: the ratio of whole responses is clipped (GSPO, arXiv 2507.18071).

    ``s_i = exp(mean over the counted tokens of sequence i of (logprobs - old_logprobs))``, with the mean at most 10. The
    loss is ``max(-A s_i, -A clip(s_i, 1 - clip_low, 1 + clip_high))`` in the paper's token form ``sg[s_i] pi / sg[pi]``:
    each token has the value s_i and its own gradient. Advantages may therefore differ between the tokens of a response;
    if they are equal, the gradient is the sequence form's. The paper's ranges are 3e-4 and 4e-4.

    Args:
        logprobs, old_logprobs, advantages, mask, clip_low, clip_high, weights: as for ``policy_loss``.
        cu_seqlens: [N+1] int32 or int64; a sequence must not be split over calls.

    Returns:
        Loss per sequence: the sum over sequences of the mean over their counted tokens; the denominator is the number
        of sequences with at least one. Metrics over tokens as for ``policy_loss``, without dual clip;
        ``ratio_mean`` is the mean of s_i, the KL estimates are means over single tokens.
    """
    old_logprobs, advantages = detach_inputs(logprobs, old_logprobs, advantages, mask)
    clip_low = check_not_negative("clip_low", clip_low)
    clip_high = check_not_negative("clip_high", clip_high)
    bounds = check_cu_seqlens(cu_seqlens, len(logprobs))

    kept = keep(logprobs, mask)
    coefficients = token_coefficients(mask, cu_seqlens, "sequence_mean", dtype=logprobs.dtype)
    with torch.no_grad():
        log_ratio = kept - old_logprobs
        sequence_of = sequence_index(bounds, logprobs.device)
        # float64, because clip ranges are a few 1e-4, close to the error of a float32 sum over thousands of tokens.
        means = sequence_sums((log_ratio * coefficients * mask).double(), sequence_of, len(bounds) - 1)
    # kept - kept.detach() is 0 but has a gradient: the ratio's value is the sequence's, its gradient the token's own.
    ratio = (means[sequence_of].to(logprobs.dtype) + (kept - kept.detach())).clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()
    token_loss, is_clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    fractions = clip_fractions(is_clipped & (advantages < 0), is_clipped & (advantages > 0))
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics = ratio_metrics(log_ratio, ratio, mask, fractions)
    total, _ = weighted_sum(token_loss, mask, weights, coefficients)
    return Loss(total, counted_sequences(mask, bounds).to(logprobs.dtype).sum(), metrics)


@register.policy_loss("cispo")
def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> Loss:
    """Log-likelihood weighted by the clipped, constant ratio (CISPO, arXiv 2506.13585).

    ``-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A logprobs``: unlike with PPO's clip, no token loses its gradient.

    Both bounds are distances from 1 as in ``policy_loss``: the ratio is capped at ``1 + clip_high``. Some trainers call
    the cap itself epsilon_high: their 5.0 is ``clip_high=4.0`` here. A ``clip_low`` of 1 or more disables the lower
    bound, as in the paper, because a ratio is never below 0.

    Args:
        logprobs, old_logprobs, advantages, mask, weights, coefficients: as for ``policy_loss``.
        clip_low, clip_high: at least 0.

    Returns:
        Loss per token. Metrics as for ``policy_loss``, without dual clip; the clip fractions count the ratios outside
        the range, regardless of the advantage.
    """
    old_logprobs, advantages = detach_inputs(logprobs, old_logprobs, advantages, mask)
    lowest = 1.0 - check_not_negative("clip_low", clip_low)
    highest = 1.0 + check_not_negative("clip_high", clip_high)

    kept = keep(logprobs, mask)
    log_ratio = (kept.detach() - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    # The ratio is computed from detached log-probs, so the gradient flows through ``kept`` only.
    token_loss = -ratio.clamp(lowest, highest) * advantages * kept
    metrics = ratio_metrics(log_ratio, ratio, mask, clip_fractions(ratio < lowest, ratio > highest))
    return Loss(*weighted_sum(token_loss, mask, weights, coefficients), metrics)


def lm_loss(logprobs: Tensor, mask: Tensor) -> Loss:
    """Negative log-likelihood of the tokens in the mask: the loss on positive examples (VAPO, arXiv 2504.05118).

    The caller's mask contains only tokens of responses verified as correct, so the denominator counts only these tokens.

    Args:
        logprobs: [T] float32 or float64, with gradient: the log-probs of the current policy.
        mask: [T] 1 for the tokens to learn.
    """
    check_float_vector("logprobs", logprobs)
    check_mask(mask, "logprobs", logprobs)
    return Loss(-masked_sum(logprobs, mask), mask_total(mask, logprobs.dtype))


def detach_inputs(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``old_logprobs`` and ``advantages`` [T], checked, without gradient and 0 outside the mask."""
    check_float_vector("logprobs", logprobs)
    check_same_kind("old_logprobs", old_logprobs, "logprobs", logprobs)
    check_same_kind("advantages", advantages, "logprobs", logprobs)
    check_mask(mask, "logprobs", logprobs)
    return keep(old_logprobs.detach(), mask), keep(advantages.detach(), mask)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The pessimistic surrogate [T], and the tokens whose gradient the clip removed ([T] bool)."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def clip_fractions(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}


@torch.no_grad()
def ratio_metrics(
    log_ratio: Tensor, ratio: Tensor, mask: Tensor, fractions: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The metrics that all policy losses share; every argument [T]."""
    per_token = {
        **fractions,
        "approx_kl_k1": -log_ratio,
        "approx_kl_k3": torch.expm1(log_ratio) - log_ratio,
        "ratio_mean": ratio,
        "ratio_square_mean": ratio.square(),
    }
    count = mask_total(mask, ratio.dtype)
    return {name: (masked_sum(value.to(ratio.dtype), mask), count) for name, value in per_token.items()}
