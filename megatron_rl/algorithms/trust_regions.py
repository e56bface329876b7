"""Policy losses whose trust region is not a clip of the ratio: DPPO, DIS, M2PO.

DPPO (arXiv 2602.04879): a ratio does not measure how far a policy has moved: a token of probability 1e-5 may double
without consequence, a token of 0.99 cannot grow by a fifth. DPPO removes a token's gradient once the policy has moved too
far on that token in the direction of its advantage. The distance is between two-way distributions: this token against all
others. DIS (arXiv 2607.07508): no gradient outside a band of the ratio to the policy that sampled.

M2PO (arXiv 2510.01161): the second moment of the log ratios over a whole mini-batch; their mean may be 0 because large
ones cancel, the mean of their squares is not. Public implementations differ: the paper's Algorithm 1 (here, and in
Trinity-RFT) removes tokens, the authors' repository derives a clip range of PPO from the same moment, and AReaL removes
tokens by the fixed ratio of the step's first policy.

The old policy should be the behavior policy (algorithm.correction.old_policy=rollout).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, Loss, keep, mask_to_bool, weighted_sum
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


@register.policy_loss("dis", needs_rollout=True)
def dis_loss(
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
    """-A sg[ratio] log pi while 1 - clip_low < ratio < 1 + clip_high, otherwise no gradient, for either sign of A (DIS, SAO eq. 1-3).

    PPO's clip keeps the gradient that leads back into the range; DIS drops it. Tokens outside the band stay in the
    denominator. The ratio is that of the present policy, so it changes with each update of a step.

    Args:
        logprobs, old_logprobs, advantages, mask, weights, coefficients: as for ``policy_loss``; ``old_logprobs`` are those
            of the policy that sampled the tokens.
        clip_low, clip_high: at least 0; distances of the open band's ends from 1. The paper uses 0.3 and 5 for
            mathematics, 0.8 and 3 for code.

    Returns:
        Loss per token. Metrics as for ``policy_loss``, without dual clip; clip fractions count the tokens outside the band.
    """
    old_logprobs, advantages = detach_inputs(logprobs, old_logprobs, advantages, mask)
    lowest = 1.0 - check_not_negative("clip_low", clip_low)
    highest = 1.0 + check_not_negative("clip_high", clip_high)
    kept = keep(logprobs, mask)
    log_ratio = (kept.detach() - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    too_low, too_high = ratio <= lowest, ratio >= highest
    # The ratio is computed from detached log-probs, so the gradient flows through ``kept`` only.
    token_loss = keep(-advantages * ratio * kept, ~(too_low | too_high))
    metrics = ratio_metrics(log_ratio, ratio, mask, clip_fractions(too_low, too_high))
    return Loss(*weighted_sum(token_loss, mask, weights, coefficients), metrics)


@torch.no_grad()
def m2po_kept(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, max_second_moment: float = 0.04
) -> Tensor:
    """Return [T] bool: the tokens of the mask that train (M2PO, Algorithm 1).

    The trust region's tokens are those that the policy has moved in the direction of their advantage. The largest of
    their squared log ratios are removed until the mean of the rest is at most ``max_second_moment``; of equal ones
    the last is removed first. Pass a whole mini-batch: its parts alone would lose other tokens.

    Args:
        logprobs, old_logprobs, advantages, mask: as for ``m2po_loss``.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs).double()
    is_moved = mask_to_bool(mask) & (advantages * log_ratio > 0)
    moved = is_moved.nonzero()[:, 0]
    squares, order = log_ratio[moved].square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(moved) + 1, device=squares.device)
    # Means of a sorted list never fall, so the longest valid prefix is what removing one at a time would leave.
    num_kept = int((means <= check_positive("max_second_moment", max_second_moment)).sum())
    kept = mask_to_bool(mask).clone()
    kept[moved[order[num_kept:]]] = False
    return kept


@register.policy_loss("m2po", selects=m2po_kept)
def m2po_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kept: Tensor | None = None,
    weights: Tensor | None = None,
    coefficients: Tensor | None = None,
    max_second_moment: float = 0.04,
) -> Loss:
    """-A ratio on the tokens that a trust region of the whole mini-batch's second moment keeps (M2PO); no clip.

    Removed tokens stay in the denominator. Tokens that have moved against their advantage are never removed.

    Args:
        logprobs, old_logprobs, advantages, mask, weights, coefficients: as for ``policy_loss``; ``old_logprobs`` are those
            of the policy that sampled the tokens.
        kept: [T] bool, ``m2po_kept`` of the mini-batch; None: the given tokens are a whole mini-batch.
        max_second_moment: largest mean of the squared log ratios, above 0; 0.04 in all runs of the paper.

    Returns:
        Loss per token. Metrics as for ``policy_loss``, without dual clip, where clip fractions count the removed tokens;
        ``second_moment``: mean of the squared log ratios of the trust region's tokens, before any is removed.
    """
    old_logprobs, advantages = detach_inputs(logprobs, old_logprobs, advantages, mask)
    current = keep(logprobs, mask)
    if kept is None:
        kept = m2po_kept(current, old_logprobs, advantages, mask, max_second_moment=max_second_moment)
    log_ratio = _log_ratio(current, old_logprobs)
    ratio = log_ratio.exp()
    removed, log_ratio = mask_to_bool(mask) & ~kept, log_ratio.detach()
    metrics = ratio_metrics(log_ratio, ratio, mask, clip_fractions(removed & (log_ratio < 0), removed & (log_ratio > 0)))
    moved = (mask_to_bool(mask) & (advantages * log_ratio > 0)).to(ratio.dtype)
    metrics["second_moment"] = (log_ratio.square() * moved).sum(), moved.sum()
    return Loss(*weighted_sum(keep(-advantages * ratio, kept), mask, weights, coefficients), metrics)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
