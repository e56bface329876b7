"""The training loop: one method per stage, in the order of the table (``table.py``), run by its graph.

Produces: updated weights, checkpoints, metrics. Consumes: prompts. Rollout stages are coroutines on the asyncio
thread; trainer stages run on the main thread and are collective over all ranks; host stages run next to them. What
travels between stages of one step lies in that step's StepState; stages of different steps share only the run's parts.
"""

import asyncio
import gc
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.algorithms.value_convergence import ValueConvergence
from megatron_rl.config.derived import (
    effective_window_tokens,
    needs_greedy,
    publishes_in_flight,
    trains_whole_groups,
    trains_whole_responses,
)
from megatron_rl.config.schema import Config, HealthAction, OldPolicy, RoutingReplay, TrainsOn
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.rewards.lines.line_rewards import ProcessRewarder, values_after_tokens
from megatron_rl.rollout.service import RolloutService
from megatron_rl.run.checkpoints import Checkpointer
from megatron_rl.run.policy_exports import PolicyExporter
from megatron_rl.run.recorder import Recorder
from megatron_rl.step import metrics as step_metrics
from megatron_rl.step.advantage_spans import SINGLE_RESPONSE, ResponseRules, greedy_rewards
from megatron_rl.step.collect import Collector
from megatron_rl.step.evaluation import EvaluationServers, Evaluator
from megatron_rl.step.first_update import finish_own_logprobs, uses_own_logprobs
from megatron_rl.step.graph import Resource, Stage
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loss_batches import (
    critic_responses,
    policy_batch,
    response_batch,
    store_model_outputs,
    store_untrained,
    window_critic_batch,
)
from megatron_rl.step.packing import response_field, window_batch, window_routes, with_routes
from megatron_rl.step.parity import EngineMismatch, ParityCheck
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.stage_facts import ChildCpuClock
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import planned_updates, train_critic, train_policy
from megatron_rl.step.watchdog import MAX_ROLLBACKS, Finding, Rollback, TrainingCollapsed, Watchdog
from megatron_rl.step.window_advantages import ModelOutputs, window_advantages
from megatron_rl.training.trainer_group import TrainerGroup


@dataclass(frozen=True)
class LoopComponents:
    """What the loop works with: everything that outlives a step."""

    group: TrainerGroup
    pool: SlotPool
    collector: Collector
    rollout: RolloutService
    grader: ResponseScorer
    evaluator: Evaluator
    recorder: Recorder
    saver: Checkpointer
    keeper: PolicyExporter
    process_rewarder: ProcessRewarder
    stop_after: Callable[[int], None]
    """Opens no step after this one."""
    parity: ParityCheck
    watchdog: Watchdog
    fleet: EvaluationServers | None = None
    """With it evaluation goes on beside training."""
    rules: ResponseRules = SINGLE_RESPONSE
    settling: ValueConvergence | None = None
    """With it the critic trains alone until it has settled (value pretraining)."""
    vision: ImageProcessor | None = None
    keep_samples: Callable[[StepState, int], None] = lambda state, step: None


class TrainingLoop:
    """The stages of the driver (rank 0); ``actions`` hands them to the stage runner."""

    def __init__(self, config: Config, parts: LoopComponents) -> None:
        self._config = config
        self._parts = parts
        self._kl_penalty = KlPenalty(config.algorithm.kl)
        # A critic that trains alone never counts as warm.
        self._critic_warmup_steps = config.run.num_steps if parts.settling else config.critic.warmup_steps
        self._states: dict[int, StepState] = {}
        self._num_trainer_stages_left: dict[int, int] = {}
        """Step -> trainer stages that have not run."""
        self._newest_trained = self._examined = -1
        """The newest step that has begun to change the models; -1: none of this process."""
        self._children = ChildCpuClock()

    def load_state(self, driver: dict[str, Any]) -> None:
        """What ``checkpoint`` wrote, besides the pool."""
        self._kl_penalty.load_state(driver.get("kl"))
        if self._parts.settling and driver.get("settling"):
            self._parts.settling.load_state(driver["settling"])
        if driver.get("watchdog"):
            self._parts.watchdog.load_state(driver["watchdog"])

    def actions(self, graph: Sequence[Stage]) -> dict[str, Callable[[int], Any]]:
        """Stage name -> what to do in a step."""
        num_trainer_stages = sum(stage.resource is Resource.trainer for stage in graph)
        self._num_trainer_stages_left = defaultdict(lambda: num_trainer_stages)
        return {
            stage.name: self._measured(stage.name) if stage.resource is Resource.trainer else getattr(self, stage.name)
            for stage in graph
        }

    async def generate(self, step: int) -> None:
        """New tokens of every slot: one window, or full responses."""
        before_s = self._children.cpu_s()
        slots, metrics = await self._parts.collector.collect(step)
        # The next window may be generated before this one has trained.
        slots = [t if t.finished else t.frozen_copy() for t in slots]
        used_s = self._children.cpu_s() - before_s
        self._parts.recorder.log_stage_facts("generate", step, cpu_s=used_s, cores=os.cpu_count() or 1, rounds=self._parts.collector.rounds)
        trajectories = [t for t in slots if t.window_tokens(step) and not t.greedy]
        if trains_whole_groups(self._config):
            trajectories = self._parts.collector.ended_groups(step)
        elif self._trained_window(step) is None:
            trajectories = [t for t in trajectories if t.finished]
        # On a thread next to the event loop: images are read there.
        batch = await asyncio.to_thread(window_batch, trajectories, self._trained_window(step), self._parts.vision)
        if self._config.policy.moe.routing_replay is RoutingReplay.R3:
            batch = with_routes(batch, window_routes(trajectories, step))
        self._states[step] = StepState(trajectories, batch, slots, metrics=metrics)

    def sleep(self, step: int) -> None:
        """The servers make room for the trainer."""
        self._parts.rollout.sleep()

    async def score(self, step: int) -> None:
        """Rewards of what ended in this step."""
        state = self._states[step]
        await self._parts.grader.grade(state.slots, step)
        state.finished = state.ended

    def values(self, step: int) -> None:
        """The critic's values of the window's tokens."""
        state = self._states[step]
        state.values, state.final_values = self._parts.group.values(state.batch)

    def reference_logprobs(self, step: int) -> None:
        """Log-probs of the window's tokens under the reference policy."""
        state, temperature = self._states[step], self._config.rollout.temperature
        # Without the routes: the reference chooses its own experts.
        state.reference_logprobs = self._parts.group.logprobs(state.batch.only("mask"), temperature=temperature, engine="reference")

    def process_rewards(self, step: int) -> None:
        """Rewards of lines, from a process reward model."""
        state = self._states[step]
        whole = replace(state.batch, spans=None)
        after = values_after_tokens(whole, *self._parts.group.values(whole, engine="process"))
        state.line_rewards = response_field(self._parts.process_rewarder.dense_rewards(state.trajectories, after), state.trajectories)

    def old_logprobs(self, step: int) -> None:
        """Log-probs of the window's tokens under the policy that is about to be updated, but for those of its first update."""
        state, group, temperature = self._states[step], self._parts.group, self._config.rollout.temperature
        rests, settles = step < self._critic_warmup_steps, self._parts.settling is not None
        num_sequences = state.batch.num_sequences
        state.first_update = uses_own_logprobs(self._config, num_sequences, step, rests=rests, never_trains=settles)
        if state.first_update:
            others = sorted(set(range(num_sequences)) - set(state.first_update))
            state.old_logprobs = group.logprobs(state.batch, others, temperature=temperature)
        elif self._config.algorithm.correction.old_policy is OldPolicy.rollout:
            state.old_logprobs = state.batch.fields["rollout_logprobs"]
        elif self._config.policy.moe.routing_replay is RoutingReplay.R2:
            # The update follows the experts that this pass chooses: they stay on the ranks.
            state.old_logprobs = group.logprobs(state.batch, temperature=temperature, keeps_routes=True)
        else:
            state.old_logprobs = group.logprobs(state.batch, temperature=temperature)

    def advantages(self, step: int) -> None:
        """What the two losses read."""
        state, parts, algorithm = self._states[step], self._parts, self._config.algorithm
        divergence = self._kl_penalty.charge(state)
        greedy = greedy_rewards(state.slots, algorithm) if needs_greedy(self._config) else None
        signals = ModelOutputs(state.values, state.final_values, divergence.token_rewards, greedy)
        advantages = window_advantages(
            state.trajectories,
            state.batch,
            signals,
            step=self._trained_window(step),
            window_tokens=effective_window_tokens(self._config),
            algorithm=algorithm,
            rules=parts.rules,
        )
        store_model_outputs(state.trajectories, state.batch, signals, self._trained_window(step))
        state.policy_batch, found = policy_batch(
            state.trajectories,
            state.batch,
            state.old_logprobs,
            advantages,
            algorithm,
            divergence.loss_fields,
            parts.rules,
            is_partial=bool(state.first_update),
        )
        if algorithm.positive_lm_coef:
            store_untrained(state.trajectories, state.batch, state.policy_batch.fields["mask"])
        if state.values is not None:
            state.critic_batch = self._critic_batch(step, signals)
        state.metrics |= divergence.metrics
        state.metrics |= step_metrics.rollout_metrics(state.slots, step=step)
        state.metrics |= step_metrics.staleness_metrics(state.trajectories, self._trained_window(step), parts.rollout.weight_version)
        state.metrics |= step_metrics.reward_metrics(state.finished)
        if greedy:
            state.metrics["reward/greedy_mean"] = sum(greedy.values()) / len(greedy)
        state.metrics |= parts.grader.metrics(state.finished)
        state.metrics |= step_metrics.advantage_metrics(state.batch, advantages)
        state.metrics |= {f"mismatch/{name}": value for name, value in found.items()}

    def keep_slots(self, step: int) -> None:
        """For a checkpoint of this step, between two windows: a publish may come in the middle of one."""
        self._note_slots(step)

    def update_policy(self, step: int) -> None:
        """The policy loss on the window's tokens, once the critic is warm."""
        self._newest_trained = step
        state, group, limit_s = self._states[step], self._parts.group, self._config.run.stop_after_s
        if step >= self._critic_warmup_steps:
            metrics, old = train_policy(self._config, group, state.policy_batch, step, keeps_logprobs=bool(state.first_update))
            if metrics:
                self._parts.rollout.weights_changed()
                if self._parts.fleet is not None:
                    self._parts.fleet.rollout.weights_changed()
            state.metrics |= metrics
            if old is not None:
                finish_own_logprobs(self._config, state, old, self._kl_penalty)
        self._parts.keep_samples(state, step)
        state.trained_s = self._parts.recorder.elapsed_s
        if 0 < limit_s <= state.trained_s:
            self._parts.stop_after(step)

    def publish(self, step: int) -> None:
        """New weights to every server; where no token trained the policy, the servers only wake."""
        gc.collect()  # no answer is waited for
        if not publishes_in_flight(self._config.schedule):
            self._note_slots(step)
        if "policy/num_updates" in self._states[step].metrics:
            result = self._parts.rollout.publish()
            self._states[step].metrics |= {
                "sync/seconds": result.seconds,
                "sync/version": float(self._parts.rollout.weight_version),
                "sync/bytes": float(result.num_bytes),
                "sync/buffer_bytes": float(result.buffer_bytes),
            }
            if self._parts.parity.due(step):
                self._compare_engines(step)
        else:
            self._parts.rollout.wake()
        fleet, evaluator = self._parts.fleet, self._parts.evaluator
        if fleet is not None and evaluator.due(step):
            fleet.take(step, evaluator)

    async def evaluate(self, step: int) -> None:
        """Full responses to held-out prompts, where it is time for them."""
        parts, is_due = self._parts, self._parts.evaluator.due(step)
        if is_due and parts.fleet is None:
            self._states[step].metrics |= await parts.evaluator.evaluate(step)
        elif is_due and parts.fleet is not None and parts.fleet.has == step:
            parts.evaluator.begin(step, parts.recorder.add_to, parts.recorder.console.warning)

    def update_critic(self, step: int) -> None:
        """The value loss on finished responses, over all their windows."""
        state, parts = self._states[step], self._parts
        if state.critic_batch is None:
            return
        state.metrics |= train_critic(self._config, parts.group, state.critic_batch, step)
        state.metrics |= step_metrics.critic_metrics(state.critic_batch)
        if parts.settling and parts.settling.update(
            state.metrics["critic/loss"], state.metrics["critic/explained_variance"]
        ):
            parts.stop_after(step)

    def checkpoint(self, step: int) -> None:
        """Weights, optimizers, pool and sampler, where it is time for them."""
        self._examine(step)
        self._parts.keeper.keep_if_due(step, self._states[step].trained_s)
        if self._parts.saver.due(step):
            self._save(step)
        self._states[step].metrics["checkpoint/num_failed"] = float(self._parts.saver.num_failed)

    def record(self, step: int) -> None:
        """Metrics, display and report; of the step's state only what a checkpoint needs is left."""
        state, rollout = self._states[step], self._parts.rollout
        state.metrics["rollout/num_live_servers"] = float(rollout.num_live_servers)
        self._parts.recorder.end(step, state.metrics, num_server_restarts=rollout.num_restarts)
        # In place: another thread may add a later step's.
        self._states[step] = state.saved_part()
        for earlier in [other for other in list(self._states) if other < step]:
            del self._states[earlier]
        self._num_trainer_stages_left.pop(step, None)

    def close_stopped(self) -> int:
        """After a run that was asked to stop: all trained steps are recorded, the newest is saved; returns the steps done."""
        step, parts = self._newest_trained, self._parts
        if step < 0:
            return parts.recorder.num_steps_done
        if self._examined < step:
            self._examine(step)
        # One that waits for an evaluation is not recorded when the next one trains already.
        for unrecorded in range(parts.recorder.num_steps_done, step + 1):
            self.record(unrecorded)
        self._settle_save(wait=True)
        if parts.saver.newest_step != step:
            self._save(step)
            self._settle_save(wait=True)
        return step + 1

    def _critic_batch(self, step: int, signals: ModelOutputs) -> PackedBatch | None:
        state, algorithm, rules = self._states[step], self._config.algorithm, self._parts.rules
        if self._config.schedule.critic_trains_on is TrainsOn.responses:
            return response_batch(state.finished, algorithm, rules, self._parts.vision)
        return window_critic_batch(state.trajectories, state.batch, signals, step=step, algorithm=algorithm, rules=rules)

    def _trained_window(self, step: int) -> int | None:
        """The step whose tokens this one trains on; None: whole responses, over all their windows."""
        return None if trains_whole_responses(self._config) else step

    def _examine(self, step: int) -> None:
        parts, metrics = self._parts, self._states[step].metrics
        self._examined = step
        metrics |= step_metrics.passes_metrics(self._states[step])
        findings = parts.watchdog.observe(step, metrics, policy_trains=step >= self._critic_warmup_steps)
        metrics |= parts.watchdog.metrics()
        self._act_on(findings)

    def _note_slots(self, step: int) -> Callable[[], dict[str, Any]]:
        """What gives the slots without what ended in this step; noted once, before a later step changes them.

        They hold all tokens that are there by then: in async mode the next window's, which no later weights would sample.
        """
        state, pool = self._states[step], self._parts.pool
        if state.pool_state is None:
            pool.release_finished(step)
            state.pool_state, state.kl_state = pool.snapshot(), self._kl_penalty.state()
        return state.pool_state

    def _save(self, step: int) -> None:
        state, parts, slots = self._states[step], self._parts, self._note_slots(step)
        driver = {
            "pool": slots(),
            "kl": state.kl_state,
            "settling": parts.settling.state() if parts.settling else None,
            "watchdog": parts.watchdog.state(),
            "server_restarts": parts.rollout.restart_counts(),
            # For a run that is killed before it has written them down.
            "metrics": state.metrics,
        }
        parts.recorder.flush_records()
        version = parts.rollout.trainer_version  # the servers may not have it yet
        self._warn_of(parts.saver.save(step, driver, weight_version=version, healthy=parts.watchdog.healthy))

    def _settle_save(self, *, wait: bool) -> None:
        """A checkpoint that was written in the background counts from here on, if it is written."""
        self._warn_of(self._parts.saver.finish_background_save(wait=wait))

    def _warn_of(self, problem: str) -> None:
        if problem:
            self._parts.recorder.console.warning(f"no checkpoint {problem}; the next step tries again")

    def _measured(self, stage: str) -> Callable[[int], None]:
        """The stage's action; after a step's last one the ranks say what memory and CPU time they used in each."""
        action = getattr(self, stage)

        def act(step: int) -> None:
            self._settle_save(wait=False)
            with self._parts.group.stage(step, stage):
                self._share_out(step)
                action(step)
            self._num_trainer_stages_left[step] -= 1
            if not self._num_trainer_stages_left[step]:
                self._parts.group.release(step)
                self._count_use()

        return act

    def _share_out(self, step: int) -> None:
        """Once a step: which replica of the trainer works on which sequence, so that every update to come is even."""
        state, config = self._states[step], self._config
        if state.is_shared_out:
            return
        state.is_shared_out, ids = True, state.batch.ids
        ended: Sequence[int] = ids
        if config.schedule.critic_trains_on is TrainsOn.responses:
            ended = [t.id for t in critic_responses(state.ended, config.algorithm)]
        self._parts.group.share_out(state.batch, planned_updates(config, ids, ended, step))

    def _count_use(self) -> None:
        for (step, stage), (use, rank_s) in self._parts.group.use_by_stage().items():
            self._parts.recorder.log_stage_facts(stage, step, cpu_s=use.cpu_s, rank_s=rank_s)
            if step in self._states:
                self._states[step].metrics |= {
                    f"memory/{stage}_host_gib": use.host_gib,
                    f"memory/{stage}_device_gib": use.device_gib,
                }

    def _compare_engines(self, step: int) -> None:
        parts = self._parts
        try:
            parity = parts.parity.compare()
        except EngineMismatch as error:
            self._states[step].metrics |= error.parity.metrics() if error.parity else {}
            self._act_on(parts.watchdog.found("parity", str(error)))
        else:
            self._states[step].metrics |= parity.metrics()

    def _act_on(self, findings: Sequence[Finding]) -> None:
        """Warn, or end the run; the severest action wins."""
        messages = {action: [f.message for f in findings if f.action is action] for action in HealthAction}
        for message in messages[HealthAction.warn]:
            self._parts.recorder.console.warning(message)
        if messages[HealthAction.stop]:
            raise TrainingCollapsed(f"{'; '.join(messages[HealthAction.stop])}. {self._way_back()}")
        if messages[HealthAction.roll_back]:
            self._roll_back("; ".join(messages[HealthAction.roll_back]))

    def _roll_back(self, why: str) -> None:
        parts = self._parts
        number = parts.watchdog.num_rollbacks + 1
        if number > MAX_ROLLBACKS:
            raise TrainingCollapsed(f"{why}. Already rolled back {MAX_ROLLBACKS} times. {self._way_back()}")
        if parts.saver.newest_healthy is None:
            raise TrainingCollapsed(f"{why}. {self._way_back()}")
        raise Rollback(why, parts.pool.position(), number)

    def _way_back(self) -> str:
        healthy = self._parts.saver.newest_healthy
        if healthy is None:
            return "No good checkpoint to return to: start again with other settings, and save earlier (run.save_every_steps)"
        return f"The last good checkpoint is {healthy}: remove the later ones and go on with run.resume=true and other settings"
