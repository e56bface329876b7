"""The training loop: one method a stage, run by the stage graph (``stages.py``).

Produces: updated weights, checkpoints, metrics. Consumes: prompts. Rollout stages are coroutines on the asyncio
thread; trainer stages run on the main thread and are collective over all ranks; host stages run beside them. What
travels between stages of one step lies in that step's StepState; stages of different steps share only the pool.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.algorithms.settling import Settling
from megatron_rl.config.derived import effective_window_tokens
from megatron_rl.config.schema import Config, KlPlace, OldPolicy, RoutingReplay
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.data.vision import Vision
from megatron_rl.rewards.lines.dense import ProcessRewarder, values_after_tokens
from megatron_rl.rollout.service import RolloutService
from megatron_rl.run.checkpoints import Saver
from megatron_rl.run.recorder import Recorder
from megatron_rl.step import metrics as step_metrics
from megatron_rl.step.collect import Collector
from megatron_rl.step.evaluation import Evaluator
from megatron_rl.step.experience import (
    Advantages,
    ResponseRules,
    Signals,
    keep_signals,
    per_sequence_coefs,
    policy_batch,
    response_batch,
    response_field,
    window_advantages,
    window_batch,
    window_routes,
    with_routes,
)
from megatron_rl.step.grading import Grader
from megatron_rl.step.stages import Stage
from megatron_rl.training.batching import split_minibatches
from megatron_rl.training.engine import UpdateResult
from megatron_rl.training.losses import policy_denominators
from megatron_rl.training.trainer_group import TrainerGroup


@dataclass
class StepState:
    """What the stages of one step hand to each other."""

    trajectories: list[Trajectory] = field(default_factory=list)
    batch: PackedBatch | None = None
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    signals: Signals = Signals()
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
    """The driver's stages. With ``settling`` the critic trains alone until it has settled (value pretraining)."""

    def __init__(
        self,
        config: Config,
        *,
        group: TrainerGroup,
        pool: SlotPool,
        collector: Collector,
        rollout: RolloutService,
        grader: Grader,
        evaluator: Evaluator,
        recorder: Recorder,
        saver: Saver,
        rules: ResponseRules = ResponseRules(),
        process_rewarder: ProcessRewarder | None = None,
        settling: Settling | None = None,
        vision: Vision | None = None,
        stop_after: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._config = config
        self._group = group
        self._pool = pool
        self._collector = collector
        self._rollout = rollout
        self._grader = grader
        self._evaluator = evaluator
        self._recorder = recorder
        self._saver = saver
        self._rules = rules
        self._process_rewarder = process_rewarder
        self._settling = settling
        self._vision = vision
        self._stop_after = stop_after
        self._critic_warmup_steps = config.critic.warmup_steps if settling is None else config.run.num_steps
        self._window_tokens = effective_window_tokens(config)
        self._states: dict[int, StepState] = {}
        kl = config.algorithm.kl
        self._kl_controller = algorithms.AdaptiveKlController(kl.coef, kl.target, kl.horizon) if kl.target else None

    def load_state(self, driver: dict) -> None:
        """What ``checkpoint`` wrote, besides the pool."""
        if self._kl_controller and driver.get("kl"):
            self._kl_controller.load_state(driver["kl"])
        if self._settling and driver.get("settling"):
            self._settling.load_state(driver["settling"])

    def actions(self, graph: Sequence[Stage]) -> dict:
        """Stage name -> what to do in a step."""
        return {stage.name: getattr(self, stage.name) for stage in graph}

    async def generate(self, step: int) -> None:
        collected = await self._collector.collect(step)
        state = self._states[step] = StepState(collected.trajectories, num_carried=collected.num_carried)
        state.metrics |= collected.metrics
        # Beside the event loop: images are read and cut there.
        state.batch = await asyncio.to_thread(window_batch, state.trajectories, step, self._vision)
        if self._config.policy.moe.routing_replay is RoutingReplay.R3:
            state.batch = with_routes(state.batch, window_routes(state.trajectories, step))
        state.finished = [t for t in state.trajectories if t.finished]

    async def score(self, step: int) -> None:
        await self._grader.grade(self._states[step].trajectories, step)

    def old_logprobs(self, step: int) -> None:
        state, temperature = self._states[step], self._config.rollout.temperature
        if self._config.algorithm.correction.old_policy is OldPolicy.rollout:
            state.old_logprobs = state.batch.fields["rollout_logprobs"]
        elif self._config.policy.moe.routing_replay is RoutingReplay.R2:
            state.old_logprobs, routes = self._group.logprobs_and_routes(state.batch, temperature=temperature)
            state.batch = with_routes(state.batch, routes)
        else:
            state.old_logprobs = self._group.logprobs(state.batch, temperature=temperature)

    def reference_logprobs(self, step: int) -> None:
        state, temperature = self._states[step], self._config.rollout.temperature
        state.reference_logprobs = self._group.logprobs(state.batch, temperature=temperature, engine="reference")

    def values(self, step: int) -> None:
        state = self._states[step]
        values, final_values = self._group.values(state.batch)
        state.signals = replace(state.signals, values=values, final_values=final_values)

    def process_rewards(self, step: int) -> None:
        state = self._states[step]
        after = values_after_tokens(state.batch, *self._group.values(state.batch, engine="process"))
        rewards = response_field(self._process_rewarder.dense_rewards(state.trajectories, after), state.trajectories)
        state.signals = replace(state.signals, token_rewards=rewards)

    def advantages(self, step: int) -> None:
        state, algorithm = self._states[step], self._config.algorithm
        kl_coefs = self._penalize_divergence(state)
        advantages = window_advantages(
            state.trajectories,
            state.batch,
            state.signals,
            step=step,
            window_tokens=self._window_tokens,
            algorithm=algorithm,
            rules=self._rules,
        )
        keep_signals(state.trajectories, state.batch, state.signals, step)
        in_loss = algorithm.kl.place is KlPlace.loss
        state.policy_batch, mismatch = policy_batch(
            state.trajectories,
            state.batch,
            state.old_logprobs,
            advantages,
            algorithm,
            reference_logprobs=state.reference_logprobs if in_loss else None,
            kl_coefs=kl_coefs if in_loss else None,
        )
        if state.signals.values is not None:
            state.critic_batch = response_batch(state.finished, algorithm, self._rules, self._vision)
        # Books are kept here: from the next window on, the unfinished trajectories change.
        state.metrics |= self._rollout_metrics(state, advantages, step)
        state.metrics |= {f"mismatch/{name}": value for name, value in mismatch.items()}
        self._pool.release_finished()
        state.pool_state = self._pool.state() if self._saver.due(step) else {}

    def update_policy(self, step: int) -> None:
        if step >= self._critic_warmup_steps:
            state, config = self._states[step], self._config
            size, temperature = config.batch.policy_minibatch_size, config.rollout.temperature
            state.metrics |= self._update("policy", state.policy_batch, size, step, temperature=temperature)

    def sleep(self, step: int) -> None:
        """Colocated: the servers make room for the trainer."""
        self._rollout.sleep()

    def publish(self, step: int) -> None:
        if step >= self._critic_warmup_steps:
            result = self._rollout.publish()
            self._states[step].metrics |= {"sync/seconds": result.seconds, "sync/bytes": float(result.num_bytes)}
        else:
            self._rollout.wake()

    async def evaluate(self, step: int) -> None:
        self._states[step].metrics |= await self._evaluator.evaluate_if_due(step)

    def update_critic(self, step: int) -> None:
        state, config = self._states[step], self._config
        if state.critic_batch is not None:
            size, num_epochs = config.batch.critic_minibatch_size, config.critic.num_epochs
            state.metrics |= self._update("critic", state.critic_batch, size, step, num_epochs=num_epochs)
            state.metrics |= step_metrics.critic_metrics(state.critic_batch)
            if self._settling and self._settling.update(
                state.metrics["critic/loss"], state.metrics["critic/explained_variance"]
            ):
                self._stop_after(step)

    def checkpoint(self, step: int) -> None:
        if self._saver.due(step):
            settling = self._settling.state() if self._settling else None
            kl = self._kl_controller.state() if self._kl_controller else None
            driver = {"pool": self._states[step].pool_state, "kl": kl, "settling": settling}
            self._saver.save(step, driver, weight_version=self._rollout.weight_version)

    def record(self, step: int) -> None:
        self._recorder.end(step, self._states.pop(step).metrics, num_server_restarts=self._rollout.num_restarts)

    def _penalize_divergence(self, state: StepState) -> Tensor | None:
        """KL from the reference: coefficients [T] by prompt type, the controller's step, the penalty in the rewards."""
        kl = self._config.algorithm.kl
        if kl.place is KlPlace.none:
            return None
        coef = self._kl_controller.coef if self._kl_controller else kl.coef
        coefs = per_sequence_coefs(state.trajectories, state.batch, kl.coef_by_type, coef)
        mask = state.batch.fields["mask"]
        divergence = algorithms.kl_estimate(
            state.old_logprobs[mask], state.reference_logprobs[mask], kl.estimator.value
        )
        per_response = float(divergence.sum()) / len(state.trajectories)
        per_token = float(divergence.sum()) / max(len(divergence), 1)
        state.metrics |= {
            "kl/reference_per_response": per_response,
            "kl/reference_per_token": per_token,
            "kl/coef": coef,
        }
        if self._kl_controller:
            self._kl_controller.update(per_response, len(state.trajectories))
        if kl.place is KlPlace.reward:
            earlier = state.signals.token_rewards
            rewards = algorithms.kl_penalized_rewards(
                torch.zeros(len(mask)) if earlier is None else earlier,
                state.old_logprobs,
                state.reference_logprobs,
                mask,
                coefs,
                kl.estimator.value,
            )
            state.signals = replace(state.signals, token_rewards=rewards)
        return coefs

    def _rollout_metrics(self, state: StepState, advantages: Advantages, step: int) -> dict[str, float]:
        metrics = step_metrics.rollout_metrics(state.trajectories, step=step, num_carried=state.num_carried)
        metrics |= step_metrics.reward_metrics(state.finished)
        metrics |= self._grader.metrics(state.finished)
        metrics |= step_metrics.advantage_metrics(state.batch, advantages)
        return metrics

    def _update(
        self,
        role: str,
        batch: PackedBatch,
        minibatch_size: int,
        step: int,
        *,
        num_epochs: int = 1,
        temperature: float = 1.0,
    ) -> dict:
        """Passes over the batch in shuffled mini-batches; denominators are those of the whole mini-batch."""
        generator = torch.Generator().manual_seed(self._config.run.seed * 1_000_003 + step)
        results = []
        for _ in range(num_epochs):
            for indices in split_minibatches(batch.num_sequences, minibatch_size, generator):
                minibatch = batch.select(indices)
                counts = {"mask": float(minibatch.fields["mask"].sum())}
                if role == "policy":
                    counts = policy_denominators(minibatch, self._config.algorithm)
                if counts["mask"]:
                    results.append(
                        self._group.update(
                            role, minibatch, objective=role, denominators=counts, temperature=temperature
                        )
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
    for name in results[0].plan:
        total = sum(result.plan[name] for result in results)
        metrics[f"perf/{prefix}_{name}"] = total if name.startswith("num_") else total / len(results)
    return metrics
