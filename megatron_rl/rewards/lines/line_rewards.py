"""Dense rewards at line ends, from the values of a process reward model (arXiv 2410.17621). Pure.

Laws:

- A response's line rewards sum to ``weight`` times the mean score of its lines: at most ``weight`` either way, however
  many lines it has. Comments and blank lines get 0 and are not counted, so padding with them cannot raise the sum.
- Tokens outside the program get 0; a response that is unfinished, unscored, without code or of a type whose responses
  are no programs gets 0 everywhere.
- With both weights at 0 every reward is 0.
"""

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from megatron_rl.config.schema import ProcessRewardConfig, RewardConfig
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.code_lines import ENTRY_POINT_FIELD, Decode, code_lines, end_tokens, token_texts
from megatron_rl.data.trajectory import Trajectory

_CODE_REWARD = "code"
PASSED_FROM = 1.0
"""A score of at least this means that all tests passed."""


def line_rewards(scores: Sequence[float] | np.ndarray, neutral: Sequence[bool], weight: float) -> np.ndarray:
    """[L] float32: weight / (number of lines that are not neutral) * score, and 0 on neutral lines.

    Scores are the model's; they are cut to [-1, 1], the range of the labels, which bounds the sum. Raises ValueError
    for scores that are not finite on a line that counts.
    """
    values, counts = np.asarray(scores, dtype=np.float64), ~np.asarray(neutral, dtype=bool)
    if values.shape != counts.shape:
        raise ValueError(f"expected one score per line, got {len(values)} scores for {len(counts)} lines")
    if not np.isfinite(values[counts]).all():
        raise ValueError("the process reward model gave a score that is not finite; look at its training")
    rewards = np.zeros(len(values))
    if counts.any():
        rewards[counts] = weight / counts.sum() * np.clip(values[counts], -1.0, 1.0)
    return rewards.astype(np.float32)


def values_after_tokens(batch: PackedBatch, values: Tensor, final_values: Tensor) -> list[np.ndarray]:
    """Per sequence of length l: [l] float32, the value read after each token.

    values [T] are read before each token, final_values [N] after the last of each sequence (``TrainerGroup.values``).
    """
    after = np.empty(len(batch.tokens), dtype=np.float32)
    after[:-1] = values[1:].float().cpu().numpy()
    cu_seqlens = batch.cu_seqlens.cpu().numpy()
    after[cu_seqlens[1:] - 1] = final_values.float().cpu().numpy()
    return np.split(after, cu_seqlens[1:-1])


def program_types(reward: RewardConfig) -> frozenset[str] | None:
    """The prompt types that the code reward grades; None where one reward grades everything."""
    if not reward.by_type:
        return None
    return frozenset(name for name, route in reward.by_type.items() if route.name == _CODE_REWARD)


class ProcessRewarder:
    """Puts the process reward model's scores on the tokens that end lines."""

    def __init__(self, config: ProcessRewardConfig, decode: Decode, types: Collection[str] | None = None) -> None:
        """``types``: the prompt types whose responses are programs (``program_types``); None: all."""
        self._config = config
        self._decode = decode
        self._types = types

    def dense_rewards(
        self, trajectories: Sequence[Trajectory], values_of_tokens: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Per trajectory [number of response tokens] float32, zero but at line ends.

        ``values_of_tokens``: per trajectory the model's value after each token of prompt and response
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
        pieces = token_texts(trajectory.response_ids.tolist(), self._decode)
        lines = code_lines("".join(pieces), entry_point=str(trajectory.prompt.fields.get(ENTRY_POINT_FIELD, "")))
        tokens = end_tokens(lines, pieces)
        scores = np.asarray(values[len(values) - num_tokens :])[tokens]
        # Lines that end at one token share its score; each brings its part.
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
