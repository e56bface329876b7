"""The training loop: one method a stage, run by the stage graph (``stages.py``).

Produces: updated weights, checkpoints, metrics. Consumes: prompts. Rollout stages are coroutines on the asyncio
thread; trainer stages run on the main thread and are collective over all ranks; host stages run beside them. What
travels between stages of one step lies in that step's StepState; stages of different steps share only the pool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.config.checks import effective_window_tokens
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.pool import SlotPool
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.rewards.runner import RewardRunner, check_error_rate
from megatron_rl.rollout.service import RolloutService
from megatron_rl.schedule import step_metrics
from megatron_rl.schedule.evaluation import Evaluator
from megatron_rl.schedule.experience import (
    keep_values,
    policy_batch,
    response_batch,
    window_advantages,
    window_batch,
)
from megatron_rl.schedule.recorder import Recorder
from megatron_rl.schedule.saving import Saver
from megatron_rl.training.batching import split_minibatches
from megatron_rl.training.engine import UpdateResult
from megatron_rl.training.group import TrainerGroup


@dataclass
class StepState:
    """What the stages of one step hand to each other."""

    trajectories: list[Trajectory] = field(default_factory=list)
    batch: PackedBatch | None = None
    old_logprobs: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None
    num_carried: int = 0
    """Responses that go on from an earlier step."""
    finished: list[Trajectory] = field(default_factory=list)
    """Finished in this step."""
    policy_batch: PackedBatch | None = None
    critic_batch: PackedBatch | None = None
    """None in a step without a finished, scored response."""
    pool_state: dict = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class TrainingLoop:
    """The driver's stages. ``freeze_policy`` trains the critic alone (value pretraining)."""

    def __init__(
        self,
        config: Config,
        *,
        group: TrainerGroup,
        pool: SlotPool,
        rollout: RolloutService,
        rewards: RewardRunner,
        evaluator: Evaluator,
        recorder: Recorder,
        saver: Saver,
        decode: Callable[[Sequence[int]], str],
        freeze_policy: bool = False,
    ) -> None:
        self._config = config
        self._group = group
        self._pool = pool
        self._rollout = rollout
        self._rewards = rewards
        self._evaluator = evaluator
        self._recorder = recorder
        self._saver = saver
        self._decode = decode
        self._critic_warmup_steps = config.run.num_steps if freeze_policy else config.critic.warmup_steps
        self._window_tokens = effective_window_tokens(config)
        self._states: dict[int, StepState] = {}

    def actions(self) -> dict:
        """Stage name -> what to do in a step."""
        names = "generate score old_logprobs values advantages update_policy publish evaluate update_critic checkpoint record"
        return {name: getattr(self, name) for name in names.split()}

    async def generate(self, step: int) -> None:
        state = self._states[step] = StepState(trajectories=self._pool.fill())
        state.num_carried = self._pool.num_carried
        await self._rollout.generate(state.trajectories, step=step, window_tokens=self._window_tokens)
        state.batch = window_batch(state.trajectories, step)
        state.finished = [t for t in state.trajectories if t.finished]

    async def score(self, step: int) -> None:
        state = self._states[step]
        items = [(self._decode(t.response_ids), t.prompt.answer) for t in state.finished]
        scores = await self._rewards.score_many(items)
        check_error_rate(scores, max_error_rate=self._config.reward.max_error_rate)
        for trajectory, score in zip(state.finished, scores):
            trajectory.score = score

    def old_logprobs(self, step: int) -> None:
        state = self._states[step]
        state.old_logprobs = self._group.logprobs(state.batch, temperature=self._config.rollout.temperature)

    def values(self, step: int) -> None:
        state = self._states[step]
        state.values, state.final_values = self._group.values(state.batch)

    def advantages(self, step: int) -> None:
        state, config = self._states[step], self._config
        advantages = window_advantages(
            state.trajectories,
            state.batch,
            state.values,
            state.final_values,
            step=step,
            window_tokens=self._window_tokens,
            algorithm=config.algorithm,
        )
        keep_values(state.trajectories, state.batch, state.values, step)
        state.policy_batch = policy_batch(
            state.trajectories, state.batch, state.old_logprobs, advantages, config.algorithm
        )
        learnable = [t for t in state.finished if t.score.value is not None]
        state.critic_batch = response_batch(learnable, config.algorithm) if learnable else None
        # Books are kept here: from the next window on, the unfinished trajectories change.
        state.metrics |= step_metrics.rollout_metrics(state.trajectories, step=step, num_carried=state.num_carried)
        state.metrics |= step_metrics.reward_metrics(state.finished)
        state.metrics |= step_metrics.advantage_metrics(state.trajectories, state.batch, advantages, step=step)
        state.metrics |= step_metrics.mismatch_metrics(state.trajectories, state.batch, state.old_logprobs, step=step)
        self._pool.release_finished()
        state.pool_state = self._pool.state() if self._saver.due(step) else {}

    def update_policy(self, step: int) -> None:
        if step >= self._critic_warmup_steps:
            state, config = self._states[step], self._config
            size, temperature = config.batch.policy_minibatch_size, config.rollout.temperature
            state.metrics |= self._update("policy", state.policy_batch, size, step, temperature)

    def publish(self, step: int) -> None:
        if step >= self._critic_warmup_steps:
            result = self._rollout.publish()
            self._states[step].metrics |= {"sync/seconds": result.seconds, "sync/bytes": float(result.num_bytes)}

    async def evaluate(self, step: int) -> None:
        self._states[step].metrics |= await self._evaluator.evaluate_if_due(step)

    def update_critic(self, step: int) -> None:
        state = self._states[step]
        if state.critic_batch is not None:
            size = self._config.batch.critic_minibatch_size
            state.metrics |= self._update("critic", state.critic_batch, size, step)
            state.metrics |= step_metrics.critic_metrics(state.critic_batch)

    def checkpoint(self, step: int) -> None:
        if self._saver.due(step):
            self._saver.save(step, self._states[step].pool_state, weight_version=self._rollout.weight_version)

    def record(self, step: int) -> None:
        self._recorder.end(step, self._states.pop(step).metrics, num_server_restarts=self._rollout.num_restarts)

    def _update(self, role: str, batch: PackedBatch, minibatch_size: int, step: int, temperature: float = 1.0) -> dict:
        """One pass over the batch in shuffled mini-batches; denominators are those of the whole mini-batch."""
        generator = torch.Generator().manual_seed(self._config.run.seed * 1_000_003 + step)
        results = []
        for indices in split_minibatches(batch.num_sequences, minibatch_size, generator):
            minibatch = batch.select(indices)
            counts = {
                name: float(minibatch.fields[name].sum()) for name in ("mask", "lm_mask") if name in minibatch.fields
            }
            if counts["mask"]:
                results.append(
                    self._group.update(role, minibatch, objective=role, denominators=counts, temperature=temperature)
                )
        return update_metrics(role, results)


SHORT_NAMES = {"policy_loss": "loss", "value_loss": "loss", "approx_kl_k3": "kl"}
"""Metrics whose prefix says the rest."""


def update_metrics(prefix: str, results: list[UpdateResult]) -> dict[str, float]:
    """Means over a step's optimizer steps, each metric over its own denominator; empty without a step."""
    if not results:
        return {}
    sums: dict[str, list[float]] = {}
    for result in results:
        for name, (total, denominator) in result.metrics.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0], pair[1] = pair[0] + total, pair[1] + denominator
    metrics = {
        f"{prefix}/{SHORT_NAMES.get(name, name)}": total / denominator
        for name, (total, denominator) in sums.items()
        if denominator
    }
    metrics[f"{prefix}/grad_norm"] = max(r.grad_norm for r in results)
    metrics[f"{prefix}/lr"] = results[-1].lr
    metrics[f"{prefix}/num_updates"] = float(sum(not r.skipped for r in results))
    metrics[f"{prefix}/num_skipped"] = float(sum(r.skipped for r in results))
    return metrics
