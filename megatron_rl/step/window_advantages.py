"""Computes the advantages of a step's windows of training, and the mask of the tokens that train the policy. Pure.

Laws: the policy trains only on tokens that have not trained before: those of this step's window (T-PPO, arXiv 2506.15050)
and of deferred steps right before it. Prompts and an environment's messages do not train. Unscored responses do not train,
and are counted. One estimate runs over one span: a response's window of training or, in a dialogue with independent turns
(PAG, arXiv 2506.10406), one turn's share of it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.algorithms.advantages import Episodes, estimate_advantages
from megatron_rl.algorithms.sequences import repeat_per_sequence
from megatron_rl.config.schema import AlgorithmConfig, Bootstrap, LambdaKind, Overlong
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import POLICY, Trajectory, Turn
from megatron_rl.step.packing import Stretches


@dataclass(frozen=True)
class ResponseRules:
    """The structure of a run's responses; the default is a single response without an environment."""

    independent_turns: bool = False
    """True if no advantage or return crosses a turn's border."""
    masks_hot_tokens: bool = False
    """True if the policy loss excludes FIRE's hot tokens."""


SINGLE_RESPONSE = ResponseRules()


@dataclass(frozen=True)
class AdvantageSpan:
    """The generated tokens over which one advantage estimate runs: a response's window of training, or one turn's share of it."""

    row: int
    """Index of the trajectory."""
    num_tokens: int
    length: int
    """Number of generated tokens of the whole response or turn so far."""
    ended: bool
    outcome: float
    """Reward on the last token; 0 if the span has not ended or is unscored."""
    scored: bool
    role: str


def window_pieces(
    trajectories: Sequence[Trajectory], step: int, algorithm: AlgorithmConfig, rules: ResponseRules
) -> list[AdvantageSpan]:
    """Return the spans that train in ``step``, in the order of their tokens; a trajectory without such tokens has none."""
    pieces = []
    for row, trajectory in enumerate(trajectories):
        if not rules.independent_turns:
            if num_tokens := trajectory.training_tokens(step):
                pieces.append(_whole_piece(row, trajectory, num_tokens, algorithm))
            continue
        new_tokens: Counter[int] = Counter()
        for segment in trajectory.training_segments(step):
            new_tokens[segment.turn] += len(segment.token_ids)
        pieces += [
            _turn_piece(row, trajectory, turn, n, algorithm) for turn in trajectory.turns() if (n := new_tokens[turn.index])
        ]
    return pieces


def response_pieces(trajectory: Trajectory, row: int, algorithm: AlgorithmConfig, rules: ResponseRules) -> list[AdvantageSpan]:
    """Return the spans of a finished response over all its windows."""
    if not rules.independent_turns:
        return [_whole_piece(row, trajectory, trajectory.num_generated_tokens, algorithm)]
    return [_turn_piece(row, trajectory, turn, turn.num_tokens, algorithm) for turn in trajectory.turns()]


def greedy_rewards(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> dict[int, float]:
    """Map each group id to the shaped reward of its greedy response; groups whose greedy response is unscored are missing."""
    greedy = [t for t in trajectories if t.greedy and t.finished]
    return {t.group_id: _shaped(t.reward, t, algorithm) for t in greedy if t.reward is not None}


def terminal_rewards(pieces: Sequence[AdvantageSpan], cu_pieces: Tensor) -> Tensor:
    """Return [W] float32: the outcome on the last token of each non-empty span, 0 elsewhere. ``cu_pieces``: [P+1]."""
    outcomes = torch.tensor([p.outcome for p in pieces])
    rewards = torch.from_numpy(np.zeros(int(cu_pieces[-1]), np.float32))  # touched where something is put
    nonempty = cu_pieces[1:] > cu_pieces[:-1]
    rewards[cu_pieces[1:][nonempty] - 1] = outcomes[nonempty].to(torch.float32)
    return rewards


def _whole_piece(row: int, trajectory: Trajectory, num_tokens: int, algorithm: AlgorithmConfig) -> AdvantageSpan:
    ended, reward = trajectory.finished, trajectory.reward
    scored = not ended or reward is not None
    outcome = _shaped(reward, trajectory, algorithm) if ended and reward is not None else 0.0
    return AdvantageSpan(row, num_tokens, trajectory.num_generated_tokens, ended, outcome, scored, POLICY)


def _shaped(reward: float, trajectory: Trajectory, algorithm: AlgorithmConfig) -> float:
    """Return a finished response's weighted reward with DAPO's soft penalty near the end of the budget (arXiv 2503.14476, eq. 13)."""
    outcome = algorithm.outcome_coef * float(reward)
    if algorithm.overlong is Overlong.soft:
        penalty = algorithms.soft_overlong_penalty(
            torch.tensor([float(trajectory.num_response_tokens)]),
            max_length=trajectory.max_response_tokens,
            buffer=algorithm.overlong_buffer_tokens,
        )
        outcome += algorithm.overlong_factor * float(penalty)
    return outcome


def _turn_piece(row: int, trajectory: Trajectory, turn: Turn, num_tokens: int, algorithm: AlgorithmConfig) -> AdvantageSpan:
    score = trajectory.turn_scores.get(turn.index)
    value = None if score is None else score.value
    ended = turn.ended or trajectory.finished
    # A turn that the environment did not submit for scoring trains with outcome 0. A turn whose scoring failed does not train.
    scored = score is None or value is not None
    outcome = algorithm.outcome_coef * float(value) if ended and value is not None else 0.0
    return AdvantageSpan(row, num_tokens, turn.num_tokens, ended, outcome, scored, turn.role)


@dataclass(frozen=True)
class Advantages:
    """Advantages of a step's batch; W of its T tokens train in this step, and all others have 0 and False."""

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
    step: int,
    window_tokens: int,
    algorithm: AlgorithmConfig,
    rules: ResponseRules = SINGLE_RESPONSE,
) -> Advantages:
    """Compute the advantages of the tokens that train in ``step``: EGAE over the spans, or the outcomes of a group's responses compared.

    ``window_tokens``: size of a window of generation, of which an unfinished response is expected to need another half.
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


def piece_tokens(
    pieces: Sequence[AdvantageSpan], signals: ModelOutputs, window: Stretches
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the spans' sizes [spans] int64, cu_seqlens [spans + 1], ``ended`` [spans] bool, and the rewards of their tokens [tokens].

    ``window``: the spans' tokens among the batch's tokens, in the order of the spans. ``ended`` is False if the response
    continues in the next step.
    """
    sizes = torch.tensor([p.num_tokens for p in pieces], dtype=torch.int64)
    cu_pieces, ended = cu_seqlens_of(sizes), torch.tensor([p.ended for p in pieces], dtype=torch.bool)
    rewards = terminal_rewards(pieces, cu_pieces)
    if signals.token_rewards is not None:
        rewards += window.within(signals.token_rewards)
    return sizes, cu_pieces, ended, rewards


def bootstrap_values(pieces: Sequence[AdvantageSpan], signals: ModelOutputs, algorithm: AlgorithmConfig) -> Tensor | None:
    """Return [spans] V after each span's last token, used if its response continues; None selects the last token's own V (EGAE)."""
    if algorithm.bootstrap is not Bootstrap.critic or signals.final_values is None:
        return None
    return signals.final_values[torch.tensor([p.row for p in pieces], dtype=torch.int64)]


def _taken_in(trajectories: Sequence[Trajectory], step: int, algorithm: AlgorithmConfig, rules: ResponseRules) -> Tensor:
    """Return [W] bool: False on tokens that ``overlong=filter`` (truncated responses) or the masking of hot tokens excludes."""
    counts, lengths = [], []
    for t in trajectories:
        cut = algorithm.overlong is Overlong.filter and t.finished and not t.ended_naturally
        for segment in t.training_segments(step):
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
