"""The training loop: runs each stage's function (``step/stages/``) on the step's state, and does the work that all stages share.

Trainer stages run on the main thread and are collective over all ranks; rollout stages are coroutines on the asyncio thread; host
stages run next to them. Stages of one step share its ``StepState``; stages of different steps share only the run's components.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schedule_facts import Facts
from megatron_rl.config.schema import Config, TrainsOn
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.rewards.line_rewards import ProcessRewarder
from megatron_rl.rollout.service import RolloutService
from megatron_rl.run.checkpoints import PolicyExporter
from megatron_rl.run.recorder import Recorder
from megatron_rl.schedule.graph import Resource, Stage
from megatron_rl.schedule.table import LAST, LASTING
from megatron_rl.step.collect import ChildCpuClock, Collector
from megatron_rl.step.evaluation import EvaluationServers, Evaluator
from megatron_rl.step.health_guard import HealthGuard
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loss_batches import critic_responses
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.stages import function_of
from megatron_rl.step.state import StepState
from megatron_rl.step.step_saver import StepSaver
from megatron_rl.step.updates import CriticWarmup, planned_updates
from megatron_rl.step.window_advantages import SINGLE_RESPONSE, ResponseRules
from megatron_rl.training.trainer_group import TrainerGroup


@dataclass(frozen=True, kw_only=True)
class LoopComponents:
    """The objects that outlive a step, under the names that stages take as keywords."""

    config: Config
    facts: Facts
    group: TrainerGroup
    pool: SlotPool
    collector: Collector
    rollout: RolloutService
    grader: ResponseScorer
    evaluator: Evaluator
    recorder: Recorder
    policy_exporter: PolicyExporter
    process_rewarder: ProcessRewarder
    kl_penalty: KlPenalty
    health: HealthGuard
    saver: StepSaver
    warmup: CriticWarmup
    stop_after: Callable[[int], None]
    """Ends the run after the given step."""
    store_samples: Callable[[StepState, int], None]
    fleet: EvaluationServers | None = None
    """Servers for evaluation alone, on which evaluation runs during training; None if there are none."""
    rules: ResponseRules = SINGLE_RESPONSE
    vision: ImageProcessor | None = None
    children: ChildCpuClock = field(default_factory=ChildCpuClock)


class TrainingLoop:
    """Calls the stages with the driver's components (rank 0); ``actions`` returns the calls for the stage runner."""

    def __init__(self, components: LoopComponents) -> None:
        self._components = components
        self._states: dict[int, StepState] = {}
        self._num_trainer_stages_left: dict[int, int] = {}
        """Maps each step to the number of its trainer stages that have not run."""
        self._newest_trained = -1
        """The newest step of this process that has started to change the models, or -1."""

    def actions(self, graph: Sequence[Stage]) -> dict[str, Callable[[int], Any]]:
        """Map each stage's name to its action, a function of the step. Raises AttributeError for an unknown component."""
        num_trainer_stages = sum(stage.resource is Resource.trainer for stage in graph)
        self._num_trainer_stages_left = defaultdict(lambda: num_trainer_stages)
        return {stage.name: self._action(stage) for stage in graph}

    def close_stopped(self) -> int:
        """Records all trained steps of a stopped run, and saves the newest; returns the number of steps done."""
        step, components = self._newest_trained, self._components
        if step < 0:
            return components.recorder.num_steps_done
        components.health.examine(step, self._states[step])
        # A step that waits for an evaluation is not recorded yet when the next one trains.
        for unrecorded in range(components.recorder.num_steps_done, step + 1):
            self._run(LAST, unrecorded)
        components.saver.save_last(step, self._states[step])
        return step + 1

    def _action(self, stage: Stage) -> Callable[[int], Any]:
        run, taken = function_of(stage.name)
        for name in taken:
            getattr(self._components, name)
        if stage.resource is Resource.trainer:
            return lambda step: self._run_on_ranks(stage, step)
        if not inspect.iscoroutinefunction(run):
            return lambda step: self._run(stage.name, step)
        opens_step = all(distance > 0 for _, distance in stage.waits_for)

        async def act(step: int) -> None:
            if opens_step:
                self._states[step] = StepState()
            await self._run(stage.name, step)

        return act

    def _run(self, stage: str, step: int) -> Any:
        run, taken = function_of(stage)
        result = run(step, self._states[step], **{name: getattr(self._components, name) for name in taken})
        if stage == LAST:
            self._forget(step)
        return result

    def _run_on_ranks(self, stage: Stage, step: int) -> None:
        """Runs a trainer stage; after a step's last one the ranks report the memory and CPU time that they used in each."""
        # Collective, so it happens here, where no rank is inside another stage.
        self._components.saver.finish_background_save(wait=False)
        if not set(LASTING).isdisjoint(stage.products):
            self._newest_trained = step
        with self._components.group.stage(step, stage.name):
            share_out(self._components.config, self._components.group, self._states[step], step)
            self._run(stage.name, step)
        self._num_trainer_stages_left[step] -= 1
        if not self._num_trainer_stages_left[step]:
            self._components.group.release(step)
            self._record_use()

    def _record_use(self) -> None:
        for (step, stage), (use, rank_s) in self._components.group.use_by_stage().items():
            self._components.recorder.log_stage_facts(stage, step, cpu_s=use.cpu_s, rank_s=rank_s)
            # A step may be recorded and forgotten before its last trainer stage ends.
            if step in self._states:
                self._states[step].metrics |= {
                    f"memory/{stage}_host_gib": use.host_gib,
                    f"memory/{stage}_device_gib": use.device_gib,
                }

    def _forget(self, step: int) -> None:
        """Keeps only the part of a recorded step that a checkpoint needs."""
        # In place: another thread may add a later step's state.
        self._states[step] = self._states[step].saved_part()
        for earlier in [other for other in list(self._states) if other < step]:
            del self._states[earlier]
        self._num_trainer_stages_left.pop(step, None)


def share_out(config: Config, group: TrainerGroup, state: StepState, step: int) -> None:
    """Assign the step's sequences to the trainer's replicas, once per step, so that every update of the step is balanced."""
    if state.is_shared_out:
        return
    state.is_shared_out, ids = True, state.batch.ids
    ended: Sequence[int] = ids
    if config.schedule.critic_trains_on is TrainsOn.responses:
        ended = [t.id for t in critic_responses(state.ended, config.algorithm)]
    group.share_out(state.batch, planned_updates(config, ids, ended, step))
