"""Advantages and returns of packed responses: GAE, EGAE, Monte-Carlo, length-adaptive lambda; any advantage by name.

Sequences lie back to back in 1-D tensors; ``cu_seqlens`` [N+1] says where each starts. ``values[t]`` is V(s_t), read
before token t is emitted; ``rewards[t]`` is what emitting token t earned.

Invariants: nothing here carries a gradient; no number crosses a sequence border; EGAE of finished sequences is GAE bit
for bit, because both run the same code and differ only in V at the sequence end; results are on the inputs' device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.cpu_scan import gae_loop
from megatron_rl.algorithms.sequences import exact_sums, repeat_per_sequence
from megatron_rl.algorithms.shapes import (
    check_cu_seqlens,
    check_float_vector,
    check_fraction,
    check_per_sequence,
    check_positive,
    check_same_kind,
    describe,
    float_lengths,
)
from megatron_rl.system.plugins import parameters


@dataclass(frozen=True)
class Episodes:
    """What advantages are estimated from: the new tokens [T] of N responses or turns, the whole step's batch."""

    rewards: Tensor
    """[T] float32: the outcome on the last token of what finished, and token rewards (a KL penalty, say) on each."""
    cu_seqlens: Tensor
    """[N+1] int64."""
    finished: Tensor
    """[N] bool; False marks a window that was cut before its response ended."""
    valid: Tensor
    """[N] bool; False marks what could not be scored and trains nothing."""
    group_ids: Tensor
    """[N] int64: equal for the responses to one prompt."""
    gamma: float
    lam: float | Tensor
    """GAE's lambda: one, or [N]."""
    values: Tensor | None = None
    """[T] of the critic, like ``rewards``; None without a critic."""
    bootstrap: Tensor | None = None
    """[N] the critic's value after the last token; None: not to be used (algorithm.bootstrap=copy_last)."""
    baselines: Tensor | None = None
    """[N] the reward of the greedy response to the same prompt; None: none was generated."""


@torch.no_grad()
def estimate_advantages(name: str, options: Mapping[str, Any], episodes: Episodes) -> Tensor:
    """[T] by the advantage of a registered name or import path (``register.advantage`` says what it is given).

    Raises:
        ValueError: unknown name, wrong options, or a result that is no number for each token or sequence.
    """
    bounds = check_cu_seqlens(episodes.cu_seqlens, len(episodes.rewards))
    inputs = dict(vars(episodes))
    if "outcomes" in parameters(register.ADVANTAGES.find(name).function):
        inputs["outcomes"] = exact_sums(episodes.rewards, bounds).to(episodes.rewards.dtype)
    result = register.ADVANTAGES.bind(name, options)(**inputs)
    num_tokens, num_sequences = len(episodes.rewards), len(bounds) - 1
    if not isinstance(result, Tensor) or result.shape not in ((num_tokens,), (num_sequences,)):
        raise ValueError(
            f"advantage {name!r}: expected a number for each token, [{num_tokens}], or for each sequence, "
            f"[{num_sequences}], got {describe(result)}"
        )
    # No sequence is empty, so where T = N each has one token and both readings agree.
    return result if len(result) == num_tokens else repeat_per_sequence(result, bounds.diff())


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
    bounds = _check_packed_rewards(rewards, values, cu_seqlens)
    after_end = torch.zeros(len(bounds) - 1, dtype=values.dtype, device=values.device)
    return _advantages_with_end_values(rewards, values, bounds, after_end, gamma, lam)


@register.advantage("egae")
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
    bounds = _check_packed_rewards(rewards, values, cu_seqlens)
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
    return _advantages_with_end_values(rewards, values, bounds, after_end, gamma, lam)


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
    return _advantages_with_end_values(rewards, no_values, bounds, after_end, gamma, 1.0)


def _check_packed_rewards(rewards: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Check the inputs that GAE and EGAE share; returns ``cu_seqlens`` as int64 on the CPU."""
    check_float_vector("rewards", rewards)
    check_same_kind("values", values, "rewards", rewards)
    return check_cu_seqlens(cu_seqlens, len(rewards))


def _advantages_with_end_values(
    rewards: Tensor, values: Tensor, bounds: Tensor, after_end: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """GAE [T] where ``after_end`` [N] is V of the state after each sequence's last token."""
    gamma = check_fraction("gamma", gamma)
    decay = gamma * _lambda_per_sequence(lam, len(bounds) - 1, values.device)
    # One pass over memory with a dependency from token to token: a GPU's tensors are faster brought here and back.
    result = gae_loop(rewards.cpu(), values.cpu(), bounds, after_end.cpu(), gamma, decay.cpu())
    return result.to(values.device)


def _lambda_per_sequence(lam: float | Tensor, num_sequences: int, device: torch.device) -> Tensor:
    """``lam`` as float64 [N] on ``device``, checked to lie within [0, 1]."""
    if not isinstance(lam, Tensor) or lam.dim() == 0:
        return torch.full((num_sequences,), check_fraction("lam", float(lam)), dtype=torch.float64, device=device)
    check_per_sequence("lam", lam, num_sequences)
    lambdas = lam.detach().to(device, torch.float64)
    outside = ~((lambdas >= 0) & (lambdas <= 1))
    if bool(outside.any()):
        raise ValueError(f"lam: expected numbers within [0, 1], got {float(lambdas[outside][0])} in {describe(lam)}")
    return lambdas


@torch.no_grad()
def length_adaptive_lambda(lengths: Tensor, *, alpha: float = 0.05, floor: float = 0.95) -> Tensor:
    """lambda = clamp(1 - 1 / (alpha * length), floor, 1), one per sequence (VAPO, arXiv 2504.05118; floor from T-PPO).

    Args:
        lengths: [N] true response lengths in tokens, without prompt and padding; integer or float, at least 0.
        alpha: 1 / (alpha * length) is the share of the signal lost per token; more than 0.
        floor: smallest lambda, within [0, 1]; a length of 0 gets it.

    Returns:
        [N] in the dtype of float lengths, float64 for integer ones: near 1 a float32 rounding, raised to the power of
        a length of 24K tokens, would show.
    """
    floating = float_lengths("lengths", lengths)
    check_fraction("floor", floor)
    check_positive("alpha", alpha)
    return (1.0 - 1.0 / (alpha * floating)).clamp(floor, 1.0)
