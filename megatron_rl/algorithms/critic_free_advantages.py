"""Advantages without a critic: each response is compared with its group, the whole batch or a greedy response.

Invariants: group ids are any integers in any order; unscored responses (``valid`` 0) enter no statistic, regardless of
their reward, and get 0; a group of one and a group of equal rewards get exactly 0; results carry no gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.advantages import monte_carlo_returns
from megatron_rl.algorithms.aggregation import counted_sequences
from megatron_rl.algorithms.normalize import normalize_advantages
from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
from megatron_rl.algorithms.shapes import (
    INDEX_DTYPES,
    check_cu_seqlens,
    check_float_vector,
    check_mask,
    check_per_sequence,
    describe,
)


@torch.no_grad()
def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, scale_by_std: bool = True, valid: Tensor | None = None
) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation (GRPO; DAPO, arXiv 2503.14476).

    The standard deviation is the sample's (n - 1), as in the public implementations, without epsilon.
    ``scale_by_std=False`` only subtracts the mean (Dr. GRPO, arXiv 2503.20783).

    Args:
        rewards: [N] float32 or float64, one per response.
        group_ids: [N] integer; equal ids form one group, in any order.
        valid: [N] of any real dtype; 0 excludes a response. None includes all.

    Returns:
        [N] in the dtype of ``rewards``.
    """
    groups = _groups(rewards, group_ids, valid)
    centered = groups.rewards - groups.mean
    if scale_by_std:
        variance = groups.sums(centered.square()) / (groups.size - 1).clamp(min=1)
        # Uniform groups may divide by 0 here; the next line replaces their result by 0.
        centered = centered / variance.sqrt()
    return groups.scatter(torch.where(groups.is_uniform, 0.0, centered))


@torch.no_grad()
def rloo_advantages(rewards: Tensor, group_ids: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Reward minus the mean of the *other* rewards of its group (REINFORCE leave-one-out, arXiv 2402.14740).

    A group of one has no baseline: its response gets 0.

    Args:
        rewards, group_ids, valid: as for ``group_advantages``.

    Returns:
        [N] in the dtype of ``rewards``.
    """
    groups = _groups(rewards, group_ids, valid)
    others = (groups.sums(groups.rewards) - groups.rewards) / (groups.size - 1).clamp(min=1)
    return groups.scatter(torch.where(groups.is_uniform, 0.0, groups.rewards - others))


@torch.no_grad()
def reinforce_pp_advantages(
    rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    group_ids: Tensor | None = None,
    eps: float = 1e-8,
) -> Tensor:
    """Undiscounted reward-to-go, whitened over all tokens of the batch (REINFORCE++, arXiv 2501.03262).

    ``group_ids`` selects the baseline form: the mean reward of the group is subtracted from each token's reward-to-go
    before whitening. A group of one is its own baseline.

    Args:
        rewards: [T] float32 or float64: outcome on the last token, KL penalty (``kl_penalized_rewards``) on each.
        mask: [T] 0/1 of any real dtype: the tokens to train; sequences without any (unscored) enter no statistic.
        cu_seqlens: [N+1] int32 or int64.
        group_ids: [N] integer, or None for no baseline.
        eps: a standard deviation of at most eps counts as 0.

    Returns:
        [T]; 0 outside the mask. The arguments must cover the whole step's batch, never a micro-batch.
    """
    check_float_vector("rewards", rewards)
    check_mask(mask, "rewards", rewards)
    bounds = check_cu_seqlens(cu_seqlens, len(rewards))
    trained = counted_sequences(mask, bounds)
    sequence_of = sequence_index(bounds, rewards.device)
    # Rewards of unscored sequences may be any value, also NaN, and must not enter a sum.
    exact = torch.where(trained[sequence_of], rewards, 0.0).double()
    to_go = monte_carlo_returns(exact, cu_seqlens)
    if group_ids is not None:
        outcomes = sequence_sums(exact, sequence_of, len(bounds) - 1)
        groups = _groups(outcomes, group_ids, trained)
        to_go = to_go - groups.scatter(groups.mean)[sequence_of]
    return normalize_advantages(to_go, mask, kind="whiten", eps=eps).to(rewards.dtype)


@register.advantage("group")
def _group(outcomes: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """(R - mean) / std over the responses to one prompt (GRPO, DAPO)."""
    return group_advantages(outcomes, group_ids, valid=valid)


@register.advantage("group_mean")
def _group_mean(outcomes: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """R - mean over the responses to one prompt, without the division (Dr. GRPO)."""
    return group_advantages(outcomes, group_ids, valid=valid, scale_by_std=False)


@register.advantage("rloo")
def _rloo(outcomes: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """R - mean of the other responses to the prompt (REINFORCE leave-one-out)."""
    return rloo_advantages(outcomes, group_ids, valid=valid)


@register.advantage("reinforce_pp")
def _reinforce_pp(rewards: Tensor, valid: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Reward-to-go, whitened over the whole batch (REINFORCE++)."""
    return reinforce_pp_advantages(rewards, valid.repeat_interleave(cu_seqlens.diff()), cu_seqlens)


@register.advantage("reinforce_pp_baseline")
def _reinforce_pp_baseline(rewards: Tensor, valid: Tensor, cu_seqlens: Tensor, group_ids: Tensor) -> Tensor:
    """R - mean over the prompt's responses, then whitened over the whole batch."""
    mask = valid.repeat_interleave(cu_seqlens.diff())
    return reinforce_pp_advantages(rewards, mask, cu_seqlens, group_ids=group_ids)


@register.advantage("immediate")
def _immediate(rewards: Tensor) -> Tensor:
    """Each token's own reward: with the KL in the reward, log pi_teacher - log pi, which distills a teacher."""
    return rewards


@register.advantage("remax")
@torch.no_grad()
def remax_advantages(rewards: Tensor, baselines: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Reward-to-go minus the reward of the greedy response to the prompt (ReMax, arXiv 2310.10505).

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


@dataclass(frozen=True)
class _Groups:
    """Group statistics of the M valid ones of N responses: float64 tensors [M] (``valid``: [N]), repeated per member."""

    valid: Tensor
    rewards: Tensor
    member_of: Tensor
    """Group indices from 0, int64."""
    size: Tensor
    mean: Tensor
    is_uniform: Tensor
    """True for groups of one and of equal rewards. Decided by comparing rewards, not by subtracting the mean: the mean of
    equal values may have a rounding error, which dividing by the standard deviation would amplify."""
    dtype: torch.dtype

    def sums(self, values: Tensor) -> Tensor:
        """[M] sum of ``values`` [M] over each member's group."""
        return _group_sums(values, self.member_of)

    def scatter(self, values: Tensor) -> Tensor:
        """[N] with ``values`` [M] at the valid responses and 0 at the others."""
        result = torch.zeros(len(self.valid), dtype=self.dtype, device=values.device)
        result[self.valid] = values.to(self.dtype)
        return result


def _groups(rewards: Tensor, group_ids: Tensor, valid: Tensor | None) -> _Groups:
    check_float_vector("rewards", rewards)
    if not isinstance(group_ids, Tensor) or group_ids.shape != rewards.shape or group_ids.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"group_ids: expected an int32 or int64 tensor of shape {list(rewards.shape)}, got {describe(group_ids)}"
        )
    if valid is None:
        chosen = torch.ones_like(rewards, dtype=torch.bool)
    else:
        check_per_sequence("valid", valid, len(rewards))
        chosen = valid.to(rewards.device) != 0
    exact = rewards[chosen].detach().double()
    _, member_of = torch.unique(group_ids.to(rewards.device)[chosen], return_inverse=True)
    size = _group_sums(torch.ones_like(exact), member_of)
    zeros = exact.new_zeros(len(exact))
    lowest = zeros.scatter_reduce(0, member_of, exact, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, member_of, exact, "amax", include_self=False)
    return _Groups(
        valid=chosen,
        rewards=exact,
        member_of=member_of,
        size=size,
        mean=_group_sums(exact, member_of) / size,
        is_uniform=(lowest == highest)[member_of],
        dtype=rewards.dtype,
    )


def _group_sums(values: Tensor, member_of: Tensor) -> Tensor:
    # A buffer of len(values) is large enough, because there are at most as many groups as members.
    return values.new_zeros(len(values)).index_add(0, member_of, values)[member_of]
