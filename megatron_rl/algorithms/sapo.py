"""Soft adaptive policy optimization: a smooth gate instead of PPO's clip (SAPO, arXiv 2511.20347)."""

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, Loss, keep, mask_total, masked_sum, weighted_sum
from megatron_rl.algorithms.policy_loss import detach_inputs, ratio_metrics
from megatron_rl.algorithms.shapes import check_positive


@register.policy_loss("sapo")
def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    coefficients: Tensor | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Loss:
    """-A f(ratio) with f(r) = 4 / tau * sigmoid(tau (r - 1)): a token trains less the further its ratio is from 1 (SAPO).

    f has the value 2 / tau and the slope 1 at r = 1, so the first update equals the plain policy gradient's. ``tau`` is
    ``tau_positive`` where A > 0 and ``tau_negative`` elsewhere: updates that raise the likelihood of unsampled tokens
    are damped sooner. The paper averages by responses (algorithm.aggregation=sequence_mean).

    Args:
        logprobs, old_logprobs, advantages, mask, weights, coefficients: as for ``policy_loss``.
        tau_positive, tau_negative: temperatures of the gate, more than 0; the defaults are the paper's values.

    Returns:
        Loss per token. Metrics as for ``policy_loss``, with ``gate_slope`` (mean df/dr, 1 on policy) instead of the clip
        fractions.
    """
    check_positive("tau_positive", tau_positive)
    check_positive("tau_negative", tau_negative)
    old_logprobs, advantages = detach_inputs(logprobs, old_logprobs, advantages, mask)
    log_ratio = (keep(logprobs, mask) - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    taus = torch.where(advantages > 0, advantages.new_tensor(tau_positive), advantages.new_tensor(tau_negative))
    gate = torch.sigmoid(taus * (ratio - 1.0))
    slope = (4.0 * gate * (1.0 - gate)).detach()
    metrics = ratio_metrics(log_ratio, ratio, mask, {})
    metrics["gate_slope"] = (masked_sum(slope, mask), mask_total(mask, ratio.dtype))
    return Loss(*weighted_sum(-advantages * gate * 4.0 / taus, mask, weights, coefficients), metrics)
