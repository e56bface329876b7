"""Computes the advantages of a step's window, and the mask of the tokens that train the policy. Pure.

Laws: the policy trains only on tokens of this step's window (T-PPO, arXiv 2506.15050). Prompts and an environment's
messages do not train. Unscored responses do not train, and are counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.algorithms.advantages import Episodes, estimate_advantages
from megatron_rl.algorithms.sequences import repeat_per_sequence
from megatron_rl.config.schema import AlgorithmConfig, Bootstrap, LambdaKind, Overlong
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.step.advantage_spans import (
    SINGLE_RESPONSE,
    AdvantageSpan,
    ResponseRules,
    terminal_rewards,
    window_pieces,
)
from megatron_rl.step.packing import Stretches


@dataclass(frozen=True)
class Advantages:
    """Advantages of one window's batch; W of its T tokens are the window's, and all others have 0 and False."""

    advantages: Tensor
    """[T] normalized, on the window's tokens."""
    mask: Tensor
    """[T] bool, the tokens that the policy loss counts."""
    raw: Tensor
    """[W] before normalization."""
    ended: Tensor
    """[W] bool, tokens of responses (or turns) that ended in this step."""


@dataclass(frozen=True)
class ModelOutputs:
    """The models' outputs on a window's batch; all [T], except final_values [N]."""

    values: Tensor | None = None
    """V(s_t); None without a critic."""
    final_values: Tensor | None = None
    """V after the last token of each trajectory."""
    token_rewards: Tensor | None = None
    """Rewards in addition to the outcome: a KL penalty, line rewards."""
    greedy_rewards: Mapping[int, float] | None = None
    """Maps group ids to the reward of the group's greedy response; a group that is missing does not train."""


def window_advantages(
    trajectories: Sequence[Trajectory],
    batch: PackedBatch,
    signals: ModelOutputs,
    *,
    step: int | None,
    window_tokens: int,
    algorithm: AlgorithmConfig,
    rules: ResponseRules = SINGLE_RESPONSE,
) -> Advantages:
    """Compute the advantages of this step's tokens: EGAE over the spans, or the outcomes of a group's responses compared.

    ``step`` None selects the tokens of all steps, over whole responses.
    """
    window = Stretches(batch.fields["mask"])
    pieces = window_pieces(trajectories, step, algorithm, rules)
    sizes, cu_pieces, ended, rewards = piece_tokens(pieces, signals, window)
    counted = algorithms.boundary_mask(cu_pieces, ended, algorithm.ignore_boundary_tokens)
    groups = [trajectories[p.row].group_id for p in pieces]
    greedy = signals.greedy_rewards
    scored = torch.tensor([p.scored for p in pieces], dtype=torch.bool)
    if greedy is not None:
        scored &= torch.tensor([group in greedy for group in groups], dtype=torch.bool)
    counted &= repeat_per_sequence(scored, sizes)
    if rules.masks_hot_tokens or algorithm.overlong is Overlong.filter:
        counted &= _taken_in(trajectories, step, algorithm, rules)
    episodes = Episodes(
        rewards=rewards,
        cu_seqlens=cu_pieces,
        finished=ended,
        valid=scored,
        group_ids=torch.tensor(groups, dtype=torch.int64),
        gamma=algorithm.gamma,
        lam=_lambda(pieces, ended, window_tokens, algorithm),
        values=None if signals.values is None else window.within(signals.values),
        bootstrap=bootstrap_values(pieces, signals, algorithm),
        baselines=None if greedy is None else torch.tensor([greedy.get(group, 0.0) for group in groups]),
    )
    advantages = estimate_advantages(algorithm.advantage, algorithm.advantage_options, episodes)
    if algorithm.normalize_by_role:
        roles = sorted({p.role for p in pieces})
        role_ids = repeat_per_sequence(torch.tensor([roles.index(p.role) for p in pieces], dtype=torch.int32), sizes)
        normalized = algorithms.role_normalize(advantages, counted, role_ids, clamp=algorithm.advantage_clamp)
    else:
        normalized = algorithms.normalize_advantages(
            advantages, counted, kind=algorithm.normalization.value, clamp=algorithm.advantage_clamp
        )
    return Advantages(
        advantages=window.on_mask(normalized),
        mask=window.on_mask(counted),
        raw=advantages,
        ended=repeat_per_sequence(ended, sizes),
    )


class SpanTokens(NamedTuple):
    """The sizes of spans, and the rewards of their tokens."""

    sizes: Tensor
    """[spans] int64, tokens."""
    cu_seqlens: Tensor
    """[spans + 1]"""
    ended: Tensor
    """[spans] bool; False if the response continues in the next step."""
    rewards: Tensor
    """[tokens]"""


def piece_tokens(pieces: Sequence[AdvantageSpan], signals: ModelOutputs, window: Stretches) -> SpanTokens:
    """Return the spans' sizes and rewards. ``window``: the spans' tokens among the batch's tokens, in the order of the spans."""
    sizes = torch.tensor([p.num_tokens for p in pieces], dtype=torch.int64)
    cu_pieces, ended = cu_seqlens_of(sizes), torch.tensor([p.ended for p in pieces], dtype=torch.bool)
    rewards = terminal_rewards(pieces, cu_pieces)
    if signals.token_rewards is not None:
        rewards += window.within(signals.token_rewards)
    return SpanTokens(sizes, cu_pieces, ended, rewards)


def bootstrap_values(pieces: Sequence[AdvantageSpan], signals: ModelOutputs, algorithm: AlgorithmConfig) -> Tensor | None:
    """Return [spans] V after each span's last token, used if its response continues; None selects the last token's own V (EGAE)."""
    if algorithm.bootstrap is not Bootstrap.critic or signals.final_values is None:
        return None
    return signals.final_values[torch.tensor([p.row for p in pieces], dtype=torch.int64)]


def _taken_in(
    trajectories: Sequence[Trajectory], step: int | None, algorithm: AlgorithmConfig, rules: ResponseRules
) -> Tensor:
    """Return [W] bool: False on tokens of this step that the policy loss excludes."""
    counts, lengths = [], []
    for t in trajectories:
        cut = algorithm.overlong is Overlong.filter and t.finished and not t.ended_naturally
        for segment in t.segments_from_step(step):
            counts.append(not cut and not (segment.hot and rules.masks_hot_tokens))
            lengths.append(len(segment.token_ids))
    return repeat_per_sequence(torch.tensor(counts, dtype=torch.bool), torch.tensor(lengths, dtype=torch.int64))


def _lambda(pieces: Sequence[AdvantageSpan], ended: Tensor, window_tokens: int, algorithm: AlgorithmConfig) -> float | Tensor:
    if algorithm.lambda_policy is LambdaKind.constant:
        return algorithm.lambda_value
    # Integers, because a float32 rounding near 1 would be amplified by the power of the length.
    lengths = torch.tensor([p.length for p in pieces], dtype=torch.int64).clamp(min=1)
    # An unfinished response is expected to continue for about half a window (T-PPO, arXiv 2506.15050).
    lengths = lengths + (~ended) * (window_tokens // 2)
    return algorithms.length_adaptive_lambda(lengths, alpha=algorithm.lambda_alpha, floor=algorithm.lambda_value)
