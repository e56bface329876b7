"""Advantages and returns of packed responses: GAE, EGAE, Monte-Carlo, length-adaptive lambda; any advantage by name.

Sequences are concatenated in 1-D tensors and delimited by ``cu_seqlens`` [N+1]. ``values[t]`` is V(s_t), the value of
the state before token t; ``rewards[t]`` is the reward for token t.

Invariants: results carry no gradient and are on the inputs' device; no information crosses a sequence border; EGAE of
finished sequences equals GAE bit for bit, because both run the same code and differ only in V at the sequence end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.cpu_loops import gae_loop
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
    """Inputs of an advantage estimate: the new tokens [T] of N responses or turns, for the whole step's batch."""

    rewards: Tensor
    """[T] float32: the outcome on the last token of finished responses, and token rewards (a KL penalty) on each."""
    cu_seqlens: Tensor
    """[N+1] int64: start of each sequence, and the end of the last."""
    finished: Tensor
    """[N] bool; False marks a window whose response continues in the next step."""
    valid: Tensor
    """[N] bool; False marks unscored responses, which no model trains on."""
    group_ids: Tensor
    """[N] int64: equal for the responses to one prompt."""
    gamma: float
    lam: float | Tensor
    """GAE's lambda: one value, or [N]."""
    values: Tensor | None = None
    """[T] values of the critic, with the dtype of ``rewards``; None without a critic."""
    bootstrap: Tensor | None = None
    """[N] the critic's value after the last token; None copies the last value (algorithm.bootstrap=copy_last)."""
    baselines: Tensor | None = None
    """[N] the reward of the greedy response to the same prompt; None if no greedy responses were generated."""


@torch.no_grad()
def estimate_advantages(name: str, options: Mapping[str, Any], episodes: Episodes) -> Tensor:
    """Advantages [T] of the function with this registered name or import path (inputs: see ``register.advantage``).

    Raises:
        ValueError: unknown name, wrong options, or a result that is neither [T] nor [N].
    """
    bounds = check_cu_seqlens(episodes.cu_seqlens, len(episodes.rewards))
    inputs = dict(vars(episodes))
    if "outcomes" in parameters(register.ADVANTAGES.find(name).function):
        inputs["outcomes"] = exact_sums(episodes.rewards, bounds).to(episodes.rewards.dtype)
    result = register.ADVANTAGES.bind(name, options)(**inputs)
    num_tokens, num_sequences = len(episodes.rewards), len(bounds) - 1
    if not isinstance(result, Tensor) or result.shape not in ((num_tokens,), (num_sequences,)):
        raise ValueError(
            f"advantage {name!r}: expected one value per token, [{num_tokens}], or per sequence, [{num_sequences}], "
            f"got {describe(result)}"
        )
    # T = N is not ambiguous: no sequence is empty, so each has one token and both readings agree.
    return result if len(result) == num_tokens else repeat_per_sequence(result, bounds.diff())


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, *, gamma: float = 1.0, lam: float | Tensor) -> Tensor:
    """Generalized advantage estimation of finished sequences (arXiv 1506.02438).

    ``A_t = sum_k (gamma lam)^k delta_{t+k}`` with ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`` and V = 0 after the
    last token.

    Args:
        rewards, values: [T] float32 or float64, same dtype and device.
        cu_seqlens: [N+1] int32 or int64.
        gamma: discount within [0, 1].
        lam: within [0, 1]: one value, or [N] with one per sequence.

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
    """Extended GAE of windows whose responses may be unfinished (T-PPO, arXiv 2506.15050, eq. 6).

    An unfinished window has V(s_l) after its last token. By default this is the paper's assumption
    V(s_l) = V(s_{l-1}), so with gamma = 1 and no reward the last advantage is exactly 0.

    Args:
        rewards, values, cu_seqlens, gamma, lam: as for ``gae``; the sequences are this step's windows.
        finished: [N] bool, integer or float; 0 marks an unfinished response.
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
        bootstrapped = bootstrap.to(values.device, values.dtype)
    elif len(values) > 0:
        bootstrapped = values[(bounds[1:] - 1).clamp(min=0).to(values.device)]
    else:
        bootstrapped = values.new_zeros(num_sequences)
    after_end = torch.where(finished.to(values.device) != 0, 0.0, bootstrapped)
    return _advantages_with_end_values(rewards, values, bounds, after_end, gamma, lam)


@torch.no_grad()
def monte_carlo_returns(rewards: Tensor, cu_seqlens: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted reward-to-go, the critic's target at lambda = 1 (VC-PPO, arXiv 2503.01491).

    Args:
        rewards: [T] float32 or float64.
        cu_seqlens: [N+1] int32 or int64.
        gamma: discount within [0, 1].

    Returns:
        [T]: ``sum_k gamma^k r_{t+k}`` up to the end of the sequence.
    """
    check_float_vector("rewards", rewards)
    bounds = check_cu_seqlens(cu_seqlens, len(rewards))
    # A view of one zero, because T zeros would only take memory.
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
    # On the CPU even for GPU tensors: the loop depends on the previous token, so two copies are faster than a GPU kernel.
    result = gae_loop(rewards.cpu(), values.cpu(), bounds, after_end.cpu(), gamma, decay.cpu())
    return result.to(values.device)


def _lambda_per_sequence(lam: float | Tensor, num_sequences: int, device: torch.device) -> Tensor:
    """``lam`` as float64 [N] on ``device``, checked to be within [0, 1]."""
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
        alpha: 1 / (alpha * length) is the fraction of the signal lost per token; more than 0.
        floor: smallest lambda, within [0, 1]; also the lambda of length 0.

    Returns:
        [N] in the dtype of float lengths, float64 for integer lengths: a float32 rounding error of a lambda near 1 would
        matter when raised to the power of 24K tokens.
    """
    floating = float_lengths("lengths", lengths)
    check_fraction("floor", floor)
    check_positive("alpha", alpha)
    return (1.0 - 1.0 / (alpha * floating)).clamp(floor, 1.0)
