"""Chooses the responses of a step to store, and collects their columns once the policy has been updated.

Laws: whole groups are chosen by ``run.seed`` and the group's id alone. A chosen group therefore stays chosen in all its windows,
every group has the same chance, and a resumed run chooses the same groups.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data.trajectory import Score, Segment, Trajectory
from megatron_rl.rollout.generation import text_digest
from megatron_rl.run.recorder import Recorder
from megatron_rl.step.state import StepState


def store_samples(config: Config, recorder: Recorder, state: StepState, step: int) -> None:
    """Pass the chosen responses of ``step`` to the recorder, which writes them in the background."""
    limit = config.tracking.samples_per_step
    if not limit:
        return
    rows = {t.id: row for row, t in enumerate(state.trajectories)}
    others = [t for t in state.slots if t.id not in rows and (t.finished or t.window_tokens(step))]
    chosen = chosen_responses([*state.trajectories, *others], limit, seed=config.run.seed)
    if chosen:
        recorder.samples.add(step + 1, sample_columns(state, [(t, rows.get(t.id)) for t in chosen], step))


def chosen_responses(trajectories: Sequence[Trajectory], limit: int, *, seed: int) -> list[Trajectory]:
    """Choose at most ``limit`` responses, in whole groups if one fits, ordered by group and sample."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    chosen: list[Trajectory] = []
    for group in sorted(groups, key=lambda number: text_digest(f"{seed}/samples/{number}")):
        members = sorted(groups[group], key=lambda t: t.sample_index)
        # The first group is cut instead, so that at least one response is stored.
        if chosen and len(chosen) + len(members) > limit:
            break
        chosen += members[:limit]
    return sorted(chosen, key=lambda t: (t.group_id, t.sample_index))


def sample_columns(state: StepState, chosen: Sequence[tuple[Trajectory, int | None]], step: int) -> dict[str, list[Any]]:
    """Return the columns of ``tracking.samples_file`` without the tokens' texts. Each response has its row of the batch, or None.

    Arrays are copies of the chosen responses' values, so that they do not keep the step's tensors in memory.
    """
    rows = [_row(state, trajectory, row, step) for trajectory, row in chosen]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def _row(state: StepState, trajectory: Trajectory, row: int | None, step: int) -> dict[str, Any]:
    tokens = _token_columns(state, trajectory, row)
    score, mask = trajectory.score, tokens["mask"]
    difference = np.abs(tokens["trainer_logprobs"] - tokens["rollout_logprobs"])
    versions = [s.weight_version for s in trajectory.segments if s.generated and len(s.token_ids)]
    return {
        **tokens,
        "step": step + 1,
        "id": trajectory.id,
        "group": trajectory.group_id,
        "sample": trajectory.sample_index,
        "prompt_id": trajectory.prompt.id,
        "type": trajectory.prompt.type,
        "question": trajectory.prompt.text,
        "answer": trajectory.prompt.answer,
        "reward": trajectory.reward,
        "detail": score.detail if score else "",
        "error": score.error if score else "",
        "reward_metrics": dict(score.metrics) if score else {},
        "turns": [_turn(*scored) for scored in sorted((trajectory.turn_scores or trajectory.turn_grades).copy().items())],
        "finished": trajectory.finished,
        "end": _end(trajectory),
        "greedy": trajectory.greedy,
        "parent": trajectory.parent if trajectory.parent >= 0 else None,
        "num_turns": len(trajectory.turns()),
        "waited_s": sum(seconds for _, seconds in trajectory.waits.values()) if trajectory.waits else None,
        "prompt_tokens": len(trajectory.prompt.token_ids),
        "length": trajectory.num_response_tokens,
        "new_tokens": trajectory.window_tokens(step),
        "trained_tokens": int(mask.sum()),
        "advantage": _mean(tokens["advantages"][mask]),
        "mismatch": _mean(difference[~np.isnan(difference)]),
        "logprob": _mean(tokens["rollout_logprobs"][trajectory.generated_mask()]),
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "segments": [
            (len(s.token_ids), s.step + 1, s.weight_version, s.turn, s.role, s.finish_reason, _waited_s(trajectory, s))
            for s in trajectory.segments
        ],
    }


def _token_columns(state: StepState, trajectory: Trajectory, row: int | None) -> dict[str, Any]:
    """Return arrays over the response's tokens. ``row`` None: the response is not in the step's batch and does not train."""
    length = trajectory.num_response_tokens
    logprobs = np.where(trajectory.generated_mask(), trajectory.rollout_logprobs(), np.float32(np.nan))
    columns: dict[str, Any] = {
        "prompt_ids": trajectory.prompt.token_array,
        "token_ids": trajectory.response_ids,
        "rollout_logprobs": logprobs,
        "trainer_logprobs": np.full(length, np.nan, np.float32),
        "advantages": np.full(length, np.nan, np.float32),
        "mask": np.zeros(length, bool),
        "values": None,
    }
    if row is None:
        return columns
    batch, of_policy = state.batch, state.policy_batch.fields
    end = int(batch.cu_seqlens[row + 1])
    place = slice(end - length, end)
    in_window = batch.fields["mask"][place].numpy()

    def of_window(values: Tensor) -> np.ndarray:
        return np.where(in_window, values[place].float().numpy(), np.float32(np.nan))

    columns["mask"] = (of_policy["mask"][place] != 0).numpy()
    columns["advantages"] = of_window(of_policy["advantages"])
    if state.old_logprobs is not batch.fields["rollout_logprobs"]:
        old = of_window(state.old_logprobs)
        if row in set(state.first_update):
            # An update returns log-probs of the tokens that its loss reads, and a frozen policy returns none: all others are 0.
            is_known = columns["mask"] & bool(np.nan_to_num(old).any()) | (old != 0)
            old = np.where(is_known, old, np.float32(np.nan))
        columns["trainer_logprobs"] = old
    if state.values is not None:
        columns["values"] = of_window(state.values)
    return columns


def _waited_s(trajectory: Trajectory, segment: Segment) -> float | None:
    return trajectory.waits[segment.turn][1] if not segment.generated and segment.turn in trajectory.waits else None


def _turn(index: int, score: Score) -> tuple[int, float | None, str, str]:
    return (index, score.value, score.detail, score.error)


def _end(trajectory: Trajectory) -> str:
    """Return how the response ended: naturally, at its budget, before a message that did not fit, or not yet."""
    if not trajectory.finished:
        return "open"
    return "stop" if trajectory.ended_naturally else "room" if trajectory.out_of_room else "length"


def _mean(values: np.ndarray) -> float | None:
    return float(values.astype(np.float64).mean()) if len(values) else None
