"""Geometric-mean policy optimisation (GMPO, arXiv 2507.20673)."""

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.aggregation import counted_sequences, token_coefficients
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, Loss, keep, weighted_sum
from megatron_rl.algorithms.policy_loss import clip_fractions, detach_inputs, ratio_metrics
from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
from megatron_rl.algorithms.shapes import check_cu_seqlens, check_not_negative


@register.policy_loss("gmpo", averages="sequence_mean")
def gmpo_loss(
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
    """-A_i times the geometric mean of the response's token ratios, each clipped in log space (GMPO).

    ``exp(mean over the counted tokens of c(log ratio))`` with c = min(., clip_high) where A > 0 and max(., -clip_low)
    elsewhere. Outliers move a geometric mean less than PPO's arithmetic mean, so the range may be wide (the paper uses
    0.4 on either side). If a response's advantages differ, A_i is their mean over its counted tokens.

    Args:
        logprobs, old_logprobs, advantages, mask: as for ``policy_loss``.
        cu_seqlens: [N+1] int32 or int64; a sequence must not be split over calls.
        clip_low, clip_high: bounds of the log ratio, at least 0.
        weights: [T] constants that multiply the tokens' advantages. None: 1.

    Returns:
        Loss per sequence; the denominator is the number of sequences with at least one counted token. Metrics over
        tokens as for ``policy_loss``, without dual clip; ``ratio_mean`` is the mean of the geometric means.
    """
    old_logprobs, advantages = detach_inputs(logprobs, old_logprobs, advantages, mask)
    clip_low, clip_high = check_not_negative("clip_low", clip_low), check_not_negative("clip_high", clip_high)
    bounds = check_cu_seqlens(cu_seqlens, len(logprobs))
    sequence_of = sequence_index(bounds, logprobs.device)
    coefficients = token_coefficients(mask, cu_seqlens, "sequence_mean", dtype=torch.float64)

    log_ratio = (keep(logprobs, mask) - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rises = advantages > 0
    clipped = torch.where(rises, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    means = sequence_sums(clipped.double() * coefficients * mask, sequence_of, len(bounds) - 1)
    ratio = means[sequence_of].to(logprobs.dtype).exp()
    fractions = clip_fractions(~rises & (log_ratio < -clip_low), rises & (log_ratio > clip_high))
    metrics = ratio_metrics(log_ratio, ratio, mask, fractions)
    total, _ = weighted_sum(-advantages * ratio, mask, weights, coefficients.to(logprobs.dtype))
    return Loss(total, counted_sequences(mask, bounds).to(logprobs.dtype).sum(), metrics)
