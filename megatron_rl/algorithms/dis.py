"""Double-sided importance sampling: the ratio to the policy that sampled, and no gradient outside its band (DIS, arXiv 2607.07508)."""

from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, Loss, keep, weighted_sum
from megatron_rl.algorithms.policy_loss import clip_fractions, detach_inputs, ratio_metrics
from megatron_rl.algorithms.shapes import check_not_negative


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
