"""From trajectories to training batches: which tokens train what (T-PPO, papers 1.4). Pure.

Laws: the policy sees only tokens of this step's window; the critic sees a finished response once, over all its
windows; prompt tokens train nothing; a response that could not be scored trains nothing and is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.config.schema import AlgorithmConfig, Bootstrap, LambdaKind
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Trajectory


def window_batch(trajectories: Sequence[Trajectory], step: int) -> PackedBatch:
    """Prompt and response so far; ``mask`` is on the tokens that ``step`` generated, rollout_logprobs beside it."""
    rows = [t.token_ids for t in trajectories]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    windows = torch.tensor([t.window_tokens(step) for t in trajectories], dtype=torch.int64)
    mask = tail_mask(lengths, windows)
    logprobs = torch.zeros(len(mask))
    logprobs[mask] = torch.from_numpy(
        np.concatenate(
            [t.rollout_logprobs()[t.num_response_tokens - n :] for t, n in zip(trajectories, windows.tolist())]
        )
    )
    return PackedBatch(_concatenate(rows), cu_seqlens_of(lengths), {"mask": mask, "rollout_logprobs": logprobs})


def response_batch(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> PackedBatch:
    """Finished, scored responses over all windows: mask, Monte-Carlo returns and the values of generation time."""
    rows = [t.token_ids for t in trajectories]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    responses = torch.tensor([t.num_response_tokens for t in trajectories], dtype=torch.int64)
    mask = tail_mask(lengths, responses)
    cu_responses = cu_seqlens_of(responses)
    rewards = terminal_rewards(torch.tensor([t.score.value for t in trajectories]), cu_responses)
    fields = {"mask": mask, "returns": torch.zeros(len(mask)), "old_values": torch.zeros(len(mask))}
    fields["returns"][mask] = algorithms.monte_carlo_returns(rewards, cu_responses, gamma=algorithm.gamma)
    fields["old_values"][mask] = torch.tensor([v for t in trajectories for v in t.old_values], dtype=torch.float32)
    return PackedBatch(_concatenate(rows), cu_seqlens_of(lengths), fields)


@dataclass(frozen=True)
class Advantages:
    advantages: Tensor
    """[T] normalised, on the window's tokens."""
    mask: Tensor
    """[T] bool, the tokens that the policy loss counts."""
    raw: Tensor
    """[T] before normalisation."""


def window_advantages(
    trajectories: Sequence[Trajectory],
    batch: PackedBatch,
    values: Tensor,
    final_values: Tensor,
    *,
    step: int,
    window_tokens: int,
    algorithm: AlgorithmConfig,
) -> Advantages:
    """EGAE over this step's windows. values [T]: V(s_t) of the window's tokens; final_values [N]: V after the last token."""
    windows = torch.tensor([t.window_tokens(step) for t in trajectories], dtype=torch.int64)
    cu_windows = cu_seqlens_of(windows)
    finished = torch.tensor([t.finished for t in trajectories])
    scored = torch.tensor([not t.finished or _is_scored(t) for t in trajectories])
    outcomes = torch.tensor([t.score.value if t.finished and _is_scored(t) else 0.0 for t in trajectories])
    in_window = batch.fields["mask"]
    advantages = algorithms.egae(
        terminal_rewards(outcomes, cu_windows),
        values[in_window],
        cu_windows,
        finished,
        gamma=algorithm.gamma,
        lam=_lambda(trajectories, finished, window_tokens, algorithm),
        bootstrap=final_values if algorithm.bootstrap is Bootstrap.critic else None,
    )
    counted = algorithms.boundary_mask(cu_windows, finished, algorithm.ignore_boundary_tokens)
    counted &= scored.repeat_interleave(windows)
    normalized = algorithms.normalize_advantages(
        advantages, counted, kind=algorithm.normalization.value, clamp=algorithm.advantage_clamp
    )
    return Advantages(
        advantages=_scatter(normalized, in_window),
        mask=_scatter(counted, in_window),
        raw=_scatter(advantages, in_window),
    )


def policy_batch(
    trajectories: Sequence[Trajectory],
    batch: PackedBatch,
    old_logprobs: Tensor,
    advantages: Advantages,
    algorithm: AlgorithmConfig,
) -> PackedBatch:
    """What the policy loss reads: the counted tokens as ``mask``, advantages, old_logprobs, and lm_mask if it is used."""
    trained = batch.only().with_fields(
        mask=advantages.mask, advantages=advantages.advantages, old_logprobs=old_logprobs
    )
    if not algorithm.positive_lm_coef:
        return trained
    return trained.with_fields(lm_mask=positive_mask(trajectories, batch, algorithm.positive_lm_threshold))


def keep_values(trajectories: Sequence[Trajectory], batch: PackedBatch, values: Tensor, step: int) -> None:
    """Each trajectory remembers the values of its new tokens: the anchor of the value clip when it is finished."""
    windows = [t.window_tokens(step) for t in trajectories]
    for trajectory, new_values in zip(trajectories, values[batch.fields["mask"]].split(windows)):
        trajectory.old_values.extend(new_values.tolist())


def positive_mask(trajectories: Sequence[Trajectory], batch: PackedBatch, threshold: float) -> Tensor:
    """[T] bool: response tokens, all windows, of finished responses with a reward of at least ``threshold``."""
    positive = [t.finished and _is_scored(t) and t.score.value >= threshold for t in trajectories]
    tokens = [t.num_response_tokens if yes else 0 for t, yes in zip(trajectories, positive)]
    return tail_mask(batch.lengths, torch.tensor(tokens, dtype=torch.int64))


def tail_mask(lengths: Tensor, tails: Tensor) -> Tensor:
    """[T] bool: the last tails[n] tokens of each of N sequences of lengths [N]."""
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) >= ends - tails.repeat_interleave(lengths)


def terminal_rewards(outcomes: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] float32, zero but for outcomes [N] on the last token of each non-empty sequence."""
    rewards = torch.zeros(int(cu_seqlens[-1]))
    nonempty = cu_seqlens[1:] > cu_seqlens[:-1]
    rewards[cu_seqlens[1:][nonempty] - 1] = outcomes[nonempty].to(torch.float32)
    return rewards


def _lambda(
    trajectories: Sequence[Trajectory], finished: Tensor, window_tokens: int, algorithm: AlgorithmConfig
) -> float | Tensor:
    if algorithm.lambda_policy is LambdaKind.constant:
        return algorithm.lambda_value
    lengths = torch.tensor([t.num_response_tokens for t in trajectories], dtype=torch.float32).clamp(min=1)
    # An unfinished response is expected to go on for about half a window (papers 1.4).
    lengths = lengths + (~finished) * (window_tokens // 2)
    return algorithms.length_adaptive_lambda(lengths, alpha=algorithm.lambda_alpha, floor=algorithm.lambda_value)


def _is_scored(trajectory: Trajectory) -> bool:
    return trajectory.score is not None and trajectory.score.value is not None


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    full = torch.zeros(len(mask), dtype=values.dtype)
    full[mask] = values
    return full


def _concatenate(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]))
