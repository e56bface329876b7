"""Advantages without a critic: responses to one prompt are compared with each other, or all with the whole batch.

Invariants: group ids are any integers in any order; responses that could not be scored (``valid`` 0) enter no
statistic, whatever number stands there, and get 0; a group of one has nothing to compare with and gets exactly 0, as
does a group of equal rewards; nothing carries a gradient.
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
    """Reward minus the mean of its group, over the group's standard deviation (GRPO; DAPO, arXiv 2503.14476).

    The standard deviation is that of a sample (n - 1), as in the public implementations, with no epsilon.
    ``scale_by_std=False`` only subtracts the mean (Dr. GRPO, arXiv 2503.20783).

    Args:
        rewards: [N] float32 or float64, one per response.
        group_ids: [N] integer; equal numbers are one group, in any order.
        valid: [N] of any real dtype; 0 leaves a response out. None: all take part.

    Returns:
        [N] in the dtype of ``rewards``.
    """
    groups = _groups(rewards, group_ids, valid)
    centred = groups.rewards - groups.mean
    if scale_by_std:
        spread = groups.sums(centred.square()) / (groups.size - 1).clamp(min=1)
        centred = centred / spread.sqrt()
    return groups.spread_out(torch.where(groups.is_silent, 0.0, centred))


@torch.no_grad()
def rloo_advantages(rewards: Tensor, group_ids: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Reward minus the mean of the *other* rewards of its group (REINFORCE leave-one-out, arXiv 2402.14740).

    A response without others (a group of one) has no baseline: it gets 0 and trains nothing.

    Args:
        rewards, group_ids, valid: as for ``group_advantages``.

    Returns:
        [N] in the dtype of ``rewards``.
    """
    groups = _groups(rewards, group_ids, valid)
    others = (groups.sums(groups.rewards) - groups.rewards) / (groups.size - 1).clamp(min=1)
    return groups.spread_out(torch.where(groups.is_silent, 0.0, groups.rewards - others))


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

    With ``group_ids`` the baseline form: from each token's reward-to-go goes the mean, over the responses to the same
    prompt, of the whole response's reward; then the batch is whitened. A group of one becomes its own baseline.

    Args:
        rewards: [T] float32 or float64: outcome on the last token, KL penalty (``kl_penalized_rewards``) on each.
        mask: [T] 0/1 of any real dtype: the tokens to train; sequences without any (not scored) enter no statistic.
        cu_seqlens: [N+1] int32 or int64.
        group_ids: [N] integer, or None for no baseline.
        eps: a standard deviation up to this counts as 0.

    Returns:
        [T]; 0 outside the mask. Hand in the whole step's batch, never a micro-batch.
    """
    check_float_vector("rewards", rewards)
    check_mask(mask, "rewards", rewards)
    bounds = check_cu_seqlens(cu_seqlens, len(rewards))
    trained = counted_sequences(mask, bounds)
    sequence_of = sequence_index(bounds, rewards.device)
    # What was not scored may hold any number; it must not reach a sum.
    exact = torch.where(trained[sequence_of], rewards, 0.0).double()
    to_go = monte_carlo_returns(exact, cu_seqlens)
    if group_ids is not None:
        outcomes = sequence_sums(exact, sequence_of, len(bounds) - 1)
        groups = _groups(outcomes, group_ids, trained)
        to_go = to_go - groups.spread_out(groups.mean)[sequence_of]
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


@dataclass(frozen=True)
class _Groups:
    """The M valid of N responses; all tensors [M] but ``valid`` [N], statistics repeated for each member, float64."""

    valid: Tensor
    rewards: Tensor
    member_of: Tensor
    """int64 group numbers from 0."""
    size: Tensor
    mean: Tensor
    is_silent: Tensor
    """Groups of one and of equal rewards. The mean of equal numbers may be off by a rounding, and a division by their
    spread would blow that up: silence is found by comparing, not by subtracting."""
    dtype: torch.dtype

    def sums(self, values: Tensor) -> Tensor:
        """[M] sum of ``values`` [M] over the own group."""
        return _group_sums(values, self.member_of)

    def spread_out(self, values: Tensor) -> Tensor:
        """[N] of ``values`` [M], 0 for the responses that are not valid."""
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
        is_silent=(lowest == highest)[member_of],
        dtype=rewards.dtype,
    )


def _group_sums(values: Tensor, member_of: Tensor) -> Tensor:
    # There are at most as many groups as members.
    return values.new_zeros(len(values)).index_add(0, member_of, values)[member_of]
