"""The token spans over which one advantage estimate runs: windows of responses, or of a dialogue's turns. Pure.

A dialogue with independent turns (PAG, arXiv 2506.10406) is split at the turns' borders: every turn is an episode.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.config.schema import AlgorithmConfig, Overlong
from megatron_rl.data.trajectory import POLICY, Trajectory, Turn


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
    """The generated tokens over which one advantage estimate runs: a response's window, or one turn's share of it."""

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
    trajectories: Sequence[Trajectory], step: int | None, algorithm: AlgorithmConfig, rules: ResponseRules
) -> list[AdvantageSpan]:
    """Return the spans of a step's window in the order of its tokens; a trajectory without new tokens has none.

    ``step`` None selects all windows.
    """
    pieces = []
    for row, trajectory in enumerate(trajectories):
        if not rules.independent_turns:
            if trajectory.window_tokens(step):
                pieces.append(_whole_piece(row, trajectory, trajectory.window_tokens(step), algorithm))
            continue
        new_tokens: Counter[int] = Counter()
        for segment in trajectory.segments:
            if segment.generated and step in (None, segment.step):
                new_tokens[segment.turn] += len(segment.token_ids)
        pieces += [
            _turn_piece(row, trajectory, turn, n) for turn in trajectory.turns() if (n := new_tokens[turn.index])
        ]
    return pieces


def response_pieces(trajectory: Trajectory, row: int, algorithm: AlgorithmConfig, rules: ResponseRules) -> list[AdvantageSpan]:
    """Return the spans of a finished response over all its windows."""
    if not rules.independent_turns:
        return [_whole_piece(row, trajectory, trajectory.num_generated_tokens, algorithm)]
    return [_turn_piece(row, trajectory, turn, turn.num_tokens) for turn in trajectory.turns()]


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
    """Return a finished response's reward with DAPO's soft penalty near the end of the budget (arXiv 2503.14476, eq. 13)."""
    outcome = float(reward)
    if algorithm.overlong is Overlong.soft:
        penalty = algorithms.soft_overlong_penalty(
            torch.tensor([float(trajectory.num_response_tokens)]),
            max_length=trajectory.max_response_tokens,
            buffer=algorithm.overlong_buffer_tokens,
        )
        outcome += algorithm.overlong_factor * float(penalty)
    return outcome


def _turn_piece(row: int, trajectory: Trajectory, turn: Turn, num_tokens: int) -> AdvantageSpan:
    score = trajectory.turn_scores.get(turn.index)
    value = None if score is None else score.value
    ended = turn.ended or trajectory.finished
    # A turn that the environment did not submit for scoring trains with outcome 0. A turn whose scoring failed does not train.
    scored = score is None or value is not None
    outcome = float(value) if ended and value is not None else 0.0
    return AdvantageSpan(row, num_tokens, turn.num_tokens, ended, outcome, scored, turn.role)
