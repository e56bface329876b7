"""M2PO: a trust region of the second moment of the log ratios, over a whole mini-batch (arXiv 2510.01161).

A mean of log ratios may be 0 because large ones cancel; the mean of their squares is not. Public implementations differ:
the paper's Algorithm 1 (here, and in Trinity-RFT) removes tokens, the authors' repository derives a clip range of PPO
from the same moment, and AReaL removes tokens by the fixed ratio of the step's first policy.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, Loss, keep, mask_to_bool, weighted_sum
from megatron_rl.algorithms.policy_loss import clip_fractions, detach_inputs, ratio_metrics
from megatron_rl.algorithms.shapes import check_positive


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
