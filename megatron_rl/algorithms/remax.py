"""REINFORCE with the greedy response as the baseline (ReMax, arXiv 2310.10505)."""

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.advantages import monte_carlo_returns
from megatron_rl.algorithms.shapes import check_cu_seqlens, check_float_vector, check_per_sequence


@register.advantage("remax")
@torch.no_grad()
def remax_advantages(rewards: Tensor, baselines: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Reward-to-go minus the reward of the greedy response to the prompt (ReMax).

    The baseline reflects the prompt's difficulty and does not depend on the sample, so the gradient stays unbiased with
    a single sample per prompt.

    Args:
        rewards: [T] float32 or float64: the outcome on the last token, a KL penalty on each.
        baselines: [N] the reward of the greedy response; entries of sequences that are not valid may be any value.
        cu_seqlens: [N+1] int32 or int64.

    Returns:
        [T].
    """
    check_float_vector("rewards", rewards)
    bounds = check_cu_seqlens(cu_seqlens, len(rewards))
    check_per_sequence("baselines", baselines, len(bounds) - 1)
    token_baselines = baselines.to(rewards).repeat_interleave(bounds.diff().to(rewards.device))
    return monte_carlo_returns(rewards, cu_seqlens) - token_baselines
