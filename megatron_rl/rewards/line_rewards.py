"""Dense rewards at line ends, from the values of a process reward model, and that model's labels (arXiv 2410.17621). Pure.

Laws:

- The line rewards of a response sum to ``weight`` times the mean score of its lines, so their sum is within +-``weight``
  for any number of lines. Comments and blank lines get 0 and are not counted, so padding cannot raise the sum.
- Tokens outside the program get 0. All tokens get 0 in a response that is unfinished, unscored, without code or of a
  prompt type without programs.
- With both weights at 0 every reward is 0.

Labels state whether a line can still be completed to a correct program. A prefix of m lines is *recoverable* if one of K
sampled completions passes all tests. Recoverability can only be lost as m grows, so a binary search finds the first bad
line with log2(lines) queries instead of one per line. Labels are +1 before that line, -1 from it on, and 0 on neutral
lines, which the search skips.
"""

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from megatron_rl.config.schema import ProcessRewardConfig, RewardConfig
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.code_lines import ENTRY_POINT_FIELD, CodeLine, Decode, code_lines, end_tokens, token_texts
from megatron_rl.data.trajectory import Trajectory

GOOD, BAD, NEUTRAL = 1, -1, 0


class LineSearch:
    """Interactive binary search: test a prefix of ``question`` lines, pass the result to ``answer``, until ``question``
    is None.

    Lines count from 1. ``first_bad`` is num_lines + 1 if no line is bad; a program that failed its tests has a bad
    line.
    """

    def __init__(self, num_lines: int, *, passes: bool) -> None:
        if num_lines < 0:
            raise ValueError(f"num_lines must be 0 or more, got {num_lines}")
        self._low, self._high = (num_lines + 1, num_lines + 1) if passes or not num_lines else (1, num_lines)

    @property
    def question(self) -> int | None:
        """Number of lines of the next prefix to test; None once the search is finished."""
        return (self._low + self._high) // 2 if self._low < self._high else None

    def answer(self, recoverable: bool) -> None:
        tested = self.question
        if tested is None:
            raise ValueError("the search is over: no question is open")
        if recoverable:
            self._low = tested + 1
        else:
            self._high = tested

    @property
    def first_bad(self) -> int:
        if self.question is not None:
            raise ValueError(f"the search is not over: is the prefix of {self.question} lines recoverable?")
        return self._low


def scored_lines(lines: Sequence[CodeLine]) -> list[CodeLine]:
    """Lines that the search covers: all lines that are not neutral."""
    return [line for line in lines if not line.neutral]


def line_labels(lines: Sequence[CodeLine], first_bad: int) -> list[int]:
    """One label per line; ``first_bad`` counts the lines that are not neutral, from 1."""
    labels, number = [], 0
    for line in lines:
        number += not line.neutral
        labels.append(NEUTRAL if line.neutral else GOOD if number < first_bad else BAD)
    return labels


_CODE_REWARD = "code"
PASSED_FROM = 1.0
"""Scores of at least this value mean that all tests passed."""


def line_rewards(scores: Sequence[float] | np.ndarray, neutral: Sequence[bool], weight: float) -> np.ndarray:
    """[L] float32: weight / (number of scored lines) * score; 0 on neutral lines.

    Scores of the model are clipped to [-1, 1], the range of the labels, which bounds the sum. Raises ValueError for a
    scored line whose score is not finite.
    """
    values, counts = np.asarray(scores, dtype=np.float64), ~np.asarray(neutral, dtype=bool)
    if values.shape != counts.shape:
        raise ValueError(f"expected one score per line, got {len(values)} scores for {len(counts)} lines")
    if not np.isfinite(values[counts]).all():
        raise ValueError("the process reward model gave a score that is not finite; check its training")
    rewards = np.zeros(len(values))
    if counts.any():
        rewards[counts] = weight / counts.sum() * np.clip(values[counts], -1.0, 1.0)
    return rewards.astype(np.float32)


def values_after_tokens(batch: PackedBatch, values: Tensor, final_values: Tensor) -> list[np.ndarray]:
    """Values [l] float32 after each token, for every sequence of length l.

    ``values`` [T] are read before each token, ``final_values`` [N] after the last token of each sequence
    (``TrainerGroup.values``).
    """
    after = np.empty(len(batch.tokens), dtype=np.float32)
    after[:-1] = values[1:].float().cpu().numpy()
    cu_seqlens = batch.cu_seqlens.cpu().numpy()
    after[cu_seqlens[1:] - 1] = final_values.float().cpu().numpy()
    return np.split(after, cu_seqlens[1:-1])


def program_types(reward: RewardConfig) -> frozenset[str] | None:
    """Prompt types scored by the code reward; None if one reward scores everything."""
    if not reward.by_type:
        return None
    return frozenset(name for name, route in reward.by_type.items() if route.name == _CODE_REWARD)


class ProcessRewarder:
    """Assigns the process reward model's scores to the tokens that end lines."""

    def __init__(self, config: ProcessRewardConfig, decode: Decode, types: Collection[str] | None = None) -> None:
        """``types``: prompt types whose responses are programs (``program_types``); None means all types."""
        self._config = config
        self._decode = decode
        self._types = types

    def dense_rewards(
        self, trajectories: Sequence[Trajectory], values_of_tokens: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Rewards [number of response tokens] float32 per trajectory, zero except at line ends.

        ``values_of_tokens``: per trajectory, the model's value after each token of prompt and response
        (``values_after_tokens``), or after each token of the response alone.
        """
        if len(values_of_tokens) != len(trajectories):
            raise ValueError(f"expected values of {len(trajectories)} trajectories, got {len(values_of_tokens)}")
        return [self._rewards_of(t, values) for t, values in zip(trajectories, values_of_tokens, strict=True)]

    def _rewards_of(self, trajectory: Trajectory, values: np.ndarray) -> np.ndarray:
        num_tokens = trajectory.num_response_tokens
        if len(values) < num_tokens:
            raise ValueError(f"trajectory {trajectory.id} has {num_tokens} response tokens, but {len(values)} values")
        rewards = np.zeros(num_tokens, dtype=np.float32)
        weight = self._weight(trajectory)
        if not weight:
            return rewards
        texts = token_texts(trajectory.response_ids.tolist(), self._decode)
        lines = code_lines("".join(texts), entry_point=str(trajectory.prompt.fields.get(ENTRY_POINT_FIELD, "")))
        tokens = end_tokens(lines, texts)
        # Values may cover the prompt too; the response's values are always the last ones.
        scores = np.asarray(values[len(values) - num_tokens :])[tokens]
        # Lines that end at the same token use its score once each, so their rewards add up.
        np.add.at(rewards, tokens, line_rewards(scores, [line.neutral for line in lines], weight))
        return rewards

    def _weight(self, trajectory: Trajectory) -> float:
        score = trajectory.score
        if self._types is not None and trajectory.prompt.type not in self._types:
            return 0.0
        if not trajectory.finished or score is None or score.value is None:
            return 0.0
        passed = score.value >= PASSED_FROM
        return self._config.weight_if_passed if passed else self._config.weight_if_failed
