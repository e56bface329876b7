"""Advantages and returns of packed responses: GAE, EGAE, Monte-Carlo, group baselines, length-adaptive lambda.

Sequences lie back to back in 1-D tensors; ``cu_seqlens`` [N+1] says where each starts. ``values[t]`` is V(s_t), read
before token t is emitted; ``rewards[t]`` is what emitting token t earned.

Invariants: nothing here carries a gradient; no number crosses a sequence border; EGAE of finished sequences is GAE bit
for bit, because both run the same code and differ only in V at the sequence end; results are on the inputs' device.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.checks import (
    INDEX_DTYPES,
    check_cu_seqlens,
    check_float_vector,
    check_fraction,
    check_per_sequence,
    check_same_kind,
    describe,
)
from megatron_rl.algorithms.cpu_scan import advantages_one_by_one, has_numba
from megatron_rl.algorithms.scan import advantages_by_blocks


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, *, gamma: float = 1.0, lam: float | Tensor) -> Tensor:
    """Generalised advantage estimation of sequences that ended (arXiv 1506.02438).

    ``A_t = sum_k (gamma lam)^k delta_{t+k}`` with ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`` and V = 0 after the
    last token.

    Args:
        rewards, values: [T] float32 or float64, same dtype and device.
        cu_seqlens: [N+1] int32 or int64.
        gamma: discount within [0, 1].
        lam: within [0, 1]: one number, or [N] with one for each sequence.

    Returns:
        [T] advantages.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
    """
    bounds = check_packed_rewards(rewards, values, cu_seqlens)
    after_end = torch.zeros(len(bounds) - 1, dtype=values.dtype, device=values.device)
    return advantages_with_end_values(rewards, values, bounds, after_end, gamma, lam)


@torch.no_grad()
def egae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    finished: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Extended GAE of windows, some of them cut before the response ended (T-PPO, arXiv 2506.15050, eq. 6).

    GAE with V(s_l) at the cut: by default the paper's assumption V(s_l) = V(s_{l-1}), so with gamma = 1 and no reward
    the last advantage is exactly 0.

    Args:
        rewards, values, cu_seqlens, gamma, lam: as for ``gae``; the sequences are this step's windows.
        finished: [N] bool, integer or float; 0 marks a window that was cut.
        bootstrap: [N] the critic's own V(s_l), read for unfinished sequences only; None: copy the last value.

    Returns:
        [T] advantages.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
    """
    bounds = check_packed_rewards(rewards, values, cu_seqlens)
    num_sequences = len(bounds) - 1
    check_per_sequence("finished", finished, num_sequences)
    if bootstrap is not None:
        check_per_sequence("bootstrap", bootstrap, num_sequences)
        at_cut = bootstrap.to(values.device, values.dtype)
    elif len(values) > 0:
        at_cut = values[(bounds[1:] - 1).clamp(min=0).to(values.device)]
    else:
        at_cut = values.new_zeros(num_sequences)
    after_end = torch.where(finished.to(values.device) != 0, 0.0, at_cut)
    return advantages_with_end_values(rewards, values, bounds, after_end, gamma, lam)


@torch.no_grad()
def monte_carlo_returns(rewards: Tensor, cu_seqlens: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted reward-to-go, the critic's target at lambda = 1 (VC-PPO, arXiv 2503.01491).

    Args:
        rewards: [T] float32 or float64.
        cu_seqlens: [N+1] int32 or int64.
        gamma: discount within [0, 1].

    Returns:
        [T]: ``sum_k gamma^k r_{t+k}`` to the end of the sequence.
    """
    check_float_vector("rewards", rewards)
    bounds = check_cu_seqlens(cu_seqlens, len(rewards))
    no_values = rewards.new_zeros(1).expand(len(rewards))
    after_end = rewards.new_zeros(len(bounds) - 1)
    return advantages_with_end_values(rewards, no_values, bounds, after_end, gamma, 1.0)


def check_packed_rewards(rewards: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Check the inputs that GAE and EGAE share; returns ``cu_seqlens`` as int64 on the CPU."""
    check_float_vector("rewards", rewards)
    check_same_kind("values", values, "rewards", rewards)
    return check_cu_seqlens(cu_seqlens, len(rewards))


def advantages_with_end_values(
    rewards: Tensor, values: Tensor, bounds: Tensor, after_end: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """GAE [T] where ``after_end`` [N] is V of the state after each sequence's last token."""
    gamma = check_fraction("gamma", gamma)
    decay = gamma * lambda_per_sequence(lam, len(bounds) - 1, values.device)
    if values.device.type == "cpu" and has_numba():
        return advantages_one_by_one(rewards, values, bounds, after_end, gamma, decay)
    return advantages_by_blocks(rewards, values, bounds, after_end, gamma, decay)


def lambda_per_sequence(lam: float | Tensor, num_sequences: int, device: torch.device) -> Tensor:
    """``lam`` as float64 [N] on ``device``, checked to lie within [0, 1]."""
    if not isinstance(lam, Tensor) or lam.dim() == 0:
        return torch.full((num_sequences,), check_fraction("lam", lam), dtype=torch.float64, device=device)
    check_per_sequence("lam", lam, num_sequences)
    lambdas = lam.detach().to(device, torch.float64)
    outside = ~((lambdas >= 0) & (lambdas <= 1))
    if bool(outside.any()):
        raise ValueError(f"lam: expected numbers within [0, 1], got {float(lambdas[outside][0])} in {describe(lam)}")
    return lambdas


@torch.no_grad()
def length_adaptive_lambda(lengths: Tensor, *, alpha: float = 0.05, floor: float = 0.95) -> Tensor:
    """lambda = clamp(1 - 1 / (alpha * length), floor, 1), one a sequence (VAPO, arXiv 2504.05118; floor from T-PPO).

    Args:
        lengths: [N] true response lengths in tokens, without prompt and padding; integer or float, at least 0.
        alpha: 1 / (alpha * length) is the share of the signal lost a token; more than 0.
        floor: smallest lambda, within [0, 1]; a length of 0 gets it.

    Returns:
        [N] in the dtype of float lengths, float64 for integer ones: near 1 a float32 rounding, raised to the power of
        a length of 24K tokens, would show.
    """
    floating = float_lengths("lengths", lengths)
    check_fraction("floor", floor)
    if not alpha > 0:
        raise ValueError(f"alpha: expected a number above 0, got {alpha!r}")
    return (1.0 - 1.0 / (alpha * floating)).clamp(floor, 1.0)


@torch.no_grad()
def group_advantages(rewards: Tensor, group_ids: Tensor, *, scale_by_std: bool = True) -> Tensor:
    """Reward minus the mean of its group, over the group's standard deviation (GRPO; DAPO, arXiv 2503.14476).

    The standard deviation is that of a sample (n - 1), as in the public implementations, with no epsilon. A group of
    one and a group of equal rewards have no signal: exactly 0. ``scale_by_std=False`` only subtracts the mean.

    Args:
        rewards: [N] float32 or float64, one a response; drop responses that could not be scored before.
        group_ids: [N] integer; equal numbers are one group, in any order.

    Returns:
        [N] in the dtype of ``rewards``.
    """
    check_float_vector("rewards", rewards)
    if not isinstance(group_ids, Tensor) or group_ids.shape != rewards.shape or group_ids.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"group_ids: expected an int32 or int64 tensor of shape {list(rewards.shape)}, got {describe(group_ids)}"
        )
    groups, member_of = torch.unique(group_ids.to(rewards.device), return_inverse=True)
    exact = rewards.double()
    zeros = exact.new_zeros(len(groups))
    sizes = zeros.index_add(0, member_of, torch.ones_like(exact))
    centred = exact - (zeros.index_add(0, member_of, exact) / sizes)[member_of]
    lowest = zeros.scatter_reduce(0, member_of, exact, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, member_of, exact, "amax", include_self=False)
    # The mean of equal numbers may be off by a rounding; the division below would blow that up.
    silent = (lowest == highest)[member_of]
    if scale_by_std:
        variance = zeros.index_add(0, member_of, centred.square()) / (sizes - 1).clamp(min=1)
        centred = centred / variance.sqrt()[member_of]
    return torch.where(silent, 0.0, centred).to(rewards.dtype)


@torch.no_grad()
def soft_overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft penalty, to be added to the reward (arXiv 2503.14476).

    0 up to ``max_length - buffer`` tokens, falling linearly to -1 at ``max_length``, -1 beyond. Lengths are of whole
    responses: a window's edge is never an overlong response.

    Args:
        lengths: [N] response lengths in tokens, integer or float.
        max_length: L_max in tokens.
        buffer: L_cache in tokens, from 0 (a step at L_max) to ``max_length``.

    Returns:
        [N] in the dtype of float lengths, float64 for integer ones.
    """
    floating = float_lengths("lengths", lengths)
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer: expected 0 <= buffer <= max_length = {max_length}, got {buffer!r}")
    if buffer == 0:
        return torch.where(floating > max_length, -1.0, 0.0).to(floating.dtype)
    return ((max_length - buffer - floating) / buffer).clamp(-1.0, 0.0)


def float_lengths(name: str, lengths: Tensor) -> Tensor:
    """[N] lengths as floats: float32 and float64 stay, integers become float64."""
    if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"{name}: expected a 1-D integer or float tensor [N], got {describe(lengths)}")
    return lengths.detach() if lengths.is_floating_point() else lengths.detach().double()
