"""Algorithm plugins as users write them, given in a recipe by import path (see test_register.py)."""

import torch
from torch import Tensor

from megatron_rl.algorithms import Loss, register
from megatron_rl.algorithms.corrections import LogRatios


def above_best_other(outcomes: Tensor, group_ids: Tensor, valid: Tensor, *, margin: float = 0.0) -> Tensor:
    """Advantage: the outcome minus the best other outcome of the group; [N], the same for all tokens of a response."""
    others = (group_ids[:, None] == group_ids) & valid & ~torch.eye(len(outcomes), dtype=torch.bool)
    best = torch.where(others, outcomes, -torch.inf).amax(dim=1)
    return torch.where(valid & others.any(dim=1), outcomes - best - margin, 0.0)


def td_errors(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """Advantage: r_t + gamma V(s_{t+1}) - V(s_t), V = 0 at the end; because it reads ``values``, the run has a critic."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    following[cu_seqlens[1:] - 1] = 0.0
    return rewards + gamma * following - values


def unclipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    coefficients: Tensor | None = None,
    *,
    power: float = 1.0,
) -> Loss:
    """Policy loss: -A ratio^power without a clip, with the correction's weights and the aggregation's coefficients."""
    counted = mask.to(logprobs.dtype) if coefficients is None else mask * coefficients
    token_loss = -advantages * (power * (logprobs - old_logprobs)).exp()
    if weights is not None:
        token_loss = token_loss * weights
    return Loss((token_loss * counted).sum(), counted.sum().detach())


@register.policy_loss(averages="sequence_mean")
def first_tokens(logprobs: Tensor, advantages: Tensor, cu_seqlens: Tensor, weights: Tensor | None = None) -> Loss:
    """Policy loss: -A log pi of each response's first token; registered as an average over sequences."""
    first = cu_seqlens[:-1]
    token_loss = -advantages[first] * logprobs[first]
    if weights is not None:
        token_loss = token_loss * weights[first]
    return Loss(token_loss.sum(), torch.tensor(float(len(first))))


def _num_sequences(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.tensor(len(cu_seqlens) - 1)


@register.aggregation(denominator=_num_sequences)
def fixed_length(mask: Tensor, *, length: int) -> Tensor:
    """Aggregation: every token counts 1 / length and the sum is divided by the number of responses (Dr. GRPO)."""
    return torch.full(mask.shape, 1.0 / length)


def half(mask: Tensor) -> Tensor:
    """Aggregation: a constant, which the denominator cancels."""
    return torch.full(mask.shape, 0.5)


def bare(logprobs: Tensor, mask: Tensor) -> Loss:
    """Policy loss: ignores correction and aggregation, so it is refused together with either."""
    return Loss(-(logprobs * mask).sum(), mask.sum())


def square_root(ratios: LogRatios, *, floor: float = 0.0) -> Tensor:
    """Correction weight: the square root of rho, at least ``floor``."""
    return (0.5 * ratios.token).exp().clamp(min=floor)


def no_surprises(ratios: LogRatios, rejection_high: float) -> Tensor:
    """Rejection: rejects responses with a token whose rho is above rejection_high."""
    return ~ratios.any_of_sequence(ratios.token.exp() > rejection_high)


def absolute(logprobs: Tensor, reference_logprobs: Tensor, *, scale: float = 1.0) -> Tensor:
    """KL estimator: scale |log pi - log pi_ref|."""
    return scale * (logprobs - reference_logprobs).abs()


def mistaken(outcomes: Tensor) -> Tensor:
    """Advantage with an invalid result (a scalar), which is refused at the call."""
    return outcomes.mean()


not_a_function = 3
