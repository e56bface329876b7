"""Computes a step's metrics from its trajectories and batches. Pure; the names are documented in docs/metrics.md."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.algorithms.normalize import mean_and_deviation
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.step.packing import within
from megatron_rl.step.state import StepState
from megatron_rl.step.window_advantages import Advantages


def rollout_metrics(trajectories: Sequence[Trajectory], *, step: int) -> dict[str, float]:
    """Return the metrics of generation. Lengths cover finished responses; tokens are the ones generated in this step."""
    finished = [t for t in trajectories if t.finished]
    metrics = {
        "rollout/num_slots": sum(t.parent < 0 for t in trajectories),
        "rollout/num_finished": len(finished),
        "rollout/finished_share": len(finished) / len(trajectories),
        "rollout/prompt_tokens_mean": _mean([len(t.prompt.token_ids) for t in trajectories]),
        "step/tokens_generated": sum(t.window_tokens(step) for t in trajectories),
    }
    messages = sum(t.num_response_tokens - t.num_generated_tokens for t in trajectories)
    if messages:
        metrics["rollout/message_share"] = messages / sum(t.num_response_tokens for t in trajectories)
    rows = sum(t.parent >= 0 for t in trajectories)
    waiting = sum(t.dialogue and not t.finished and t.turn_finished for t in trajectories)
    metrics |= {name: n for name, n in (("rollout/num_further_rows", rows), ("rollout/num_waiting", waiting)) if n}
    metrics |= _dialogue_metrics([t for t in trajectories if t.dialogue], step, waiting)
    hot = sum(len(s.token_ids) for t in trajectories for s in t.segments if s.hot and s.step == step)
    if hot:
        metrics["rollout/hot_tokens"] = hot
    if finished:
        metrics["rollout/response_tokens_mean"] = _mean([t.num_response_tokens for t in finished])
        metrics["rollout/response_tokens_max"] = max(t.num_response_tokens for t in finished)
        metrics["rollout/cut_share"] = _mean([not t.ended_naturally for t in finished])
        metrics["rollout/spans_mean"] = _mean([_num_spans(t) for t in finished])
        metrics["rollout/spans_max"] = max(map(_num_spans, finished))
    return {name: float(value) for name, value in metrics.items()}


def _dialogue_metrics(dialogues: Sequence[Trajectory], step: int, num_waiting: int) -> dict[str, float]:
    """Return the step's tokens by role, and the seconds of the environment's replies that joined in it, if the environment may wait."""
    tokens: Counter[str] = Counter()
    for segment in (s for t in dialogues for s in t.segments if s.step == step):
        tokens[segment.role] += len(segment.token_ids)
    metrics = {f"rollout/tokens_{role}": float(number) for role, number in sorted(tokens.items())}
    seconds = [took_s for t in dialogues for joined, took_s in t.waits.values() if joined == step]
    if seconds:
        metrics |= {"time/tool_s_mean": _mean(seconds), "time/tool_s_max": max(seconds)}
    if seconds or num_waiting:
        metrics["rollout/waiting_share"] = num_waiting / len(dialogues)
    return metrics


def staleness_metrics(trajectories: Sequence[Trajectory], trained: Tensor, version: int) -> dict[str, float]:
    """Return mean and maximum of the policy updates between the weights that sampled a token and ``version``, which it trains.

    ``trained``: [T] bool, the policy's mask over the prompts and responses. Returns {} if no token trains.
    """
    flags, end = trained.numpy(), 0
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        end += len(trajectory.prompt.token_ids)
        for segment in trajectory.segments:
            start, end = end, end + len(segment.token_ids)
            counts[version - segment.weight_version] += int(np.count_nonzero(flags[start:end]))
    ages = [age for age, count in counts.items() if count]
    if not ages:
        return {}
    mean = sum(age * counts[age] for age in ages) / counts.total()
    return {"rollout/staleness_mean": mean, "rollout/staleness_max": float(max(ages))}


def _num_spans(trajectory: Trajectory) -> int:
    """Count the spans of tokens that one weight version sampled."""
    versions = [s.weight_version for s in trajectory.segments if s.generated and len(s.token_ids)]
    return 1 + sum(one != two for one, two in pairwise(versions))


def reward_metrics(finished: Sequence[Trajectory]) -> dict[str, float]:
    """Return the reward metrics of finished responses, with an accuracy if every reward is 0 or 1."""
    finished = [t for t in finished if t.parent < 0]  # further rows of an episode share its reward
    rewards = [t.reward for t in finished if t.reward is not None]
    metrics = {"reward/num_unscored": float(len(finished) - len(rewards))}
    if finished:
        metrics["reward/error_rate"] = metrics["reward/num_unscored"] / len(finished)
    if rewards:
        metrics["reward/mean"] = _mean(rewards)
        if all(reward in (0, 1) for reward in rewards):
            metrics["reward/accuracy"] = _mean(rewards)
    return metrics


def passes_metrics(state: StepState) -> dict[str, float]:
    """Return the tokens processed by forward passes per generated token, by trainer stage and in all.

    Prompts and earlier windows count too. All stages of the step must have run.
    """
    num_generated, batch = state.metrics.get("step/tokens_generated", 0.0), state.batch
    if not num_generated:
        return {}
    is_passed = state.old_logprobs is not batch.fields["rollout_logprobs"]
    of_first_update = int(batch.lengths[list(state.first_update)].sum())
    passed = {
        "old_logprobs": (len(batch.tokens) - of_first_update) * is_passed,
        "reference_logprobs": len(batch.tokens) * hasattr(state, "reference_logprobs"),
        "values": len(batch.tokens) * (state.values is not None),
        "updated_values": len(batch.tokens) * (state.updated_values is not None),
        "process_rewards": len(batch.tokens) * (state.line_rewards is not None),
        "update_policy": state.metrics.get("perf/policy_num_tokens", 0.0)
        + state.metrics.get("perf/policy_num_selecting_tokens", 0.0),
        "update_critic": state.metrics.get("perf/critic_num_tokens", 0.0),
    }
    metrics = {f"passes/{stage}": number / num_generated for stage, number in passed.items() if number}
    return {**metrics, "passes/all": sum(metrics.values())}


def advantage_metrics(batch: PackedBatch, advantages: Advantages) -> dict[str, float]:
    """Return mean and standard deviation of advantages before normalization, separately for finished and unfinished responses."""
    counted, ended = within(advantages.mask, batch.fields["mask"]), advantages.ended
    metrics: dict[str, float] = {}
    for name, group in (("finished", counted & ended), ("unfinished", counted & ~ended)):
        number = int(np.count_nonzero(group.numpy()))
        metrics[f"advantage/{name}_tokens"] = float(number)
        if number:
            mean, deviation = mean_and_deviation(advantages.raw, group)
            metrics |= {f"advantage/{name}_mean": mean, f"advantage/{name}_std": deviation}
    return metrics


_NUM_POSITIONS = 4


def critic_metrics(batch: PackedBatch) -> dict[str, float]:
    """Return how well the values from generation time predicted the returns.

    ``advantage_q1`` to ``_q4``: mean of return minus value in each quarter of the response. A critic without
    initialization bias shows no slope over the quarters (VC-PPO).
    """
    values, returns, mask = (batch.fields[name] for name in ("old_values", "returns", "mask"))
    positions = algorithms.value_by_position(values, returns, mask, batch.cu_seqlens, _NUM_POSITIONS)
    advantage, count = positions["advantage"]
    metrics = {
        "critic/explained_variance": float(algorithms.explained_variance(values, returns, mask)),
        "critic/value_mean": float(positions["value"][0].sum() / count.sum()),
        "critic/return_mean": float(positions["return"][0].sum() / count.sum()),
    }
    for index in range(_NUM_POSITIONS):
        if count[index]:
            metrics[f"critic/advantage_q{index + 1}"] = float(advantage[index] / count[index])
    return metrics


def _mean(numbers: Sequence[float]) -> float:
    return float(sum(numbers) / len(numbers))
