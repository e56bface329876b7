"""New tokens of every slot: one window, or full responses."""

import asyncio
import os

from megatron_rl.config.derived import effective_window_tokens
from megatron_rl.config.schedule_facts import Facts
from megatron_rl.config.schema import Config, RoutingReplay
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.run.recorder import Recorder
from megatron_rl.step.collect import ChildCpuClock, Collector
from megatron_rl.step.packing import window_batch, window_routes, with_routes
from megatron_rl.step.state import StepState


async def run(
    step: int,
    state: StepState,
    *,
    config: Config,
    facts: Facts,
    collector: Collector,
    recorder: Recorder,
    children: ChildCpuClock,
    vision: ImageProcessor | None,
) -> None:
    before_s = children.cpu_s()
    slots, state.metrics = await collector.collect(step)
    # Copies: the next windows may be generated before this one has trained, or are restored from a checkpoint.
    state.slots = [t.as_of(step) for t in slots]
    for t, slot in zip(slots, state.slots, strict=True):
        slot.deferred_steps = tuple(other for other in t.deferred_steps if other < step)
        if not _trains(slot, step, facts, effective_window_tokens(config)):
            slot.deferred_steps += (step,)
        t.deferred_steps = slot.deferred_steps
    used_s = children.cpu_s() - before_s
    recorder.log_stage_facts("generate", step, cpu_s=used_s, cores=os.cpu_count() or 1, rounds=collector.rounds)
    if facts.whole_groups:
        state.trajectories = collector.ended_groups(step)
    else:
        trains = [t for t in state.slots if step not in t.deferred_steps and not t.greedy]
        state.trajectories = [t for t in trains if t.training_tokens(step)]
    # Reading images would block the event loop, so the batch is built on a thread.
    state.batch = await asyncio.to_thread(window_batch, state.trajectories, step, vision)
    if config.policy.moe.routing_replay is RoutingReplay.R3:
        state.batch = with_routes(state.batch, window_routes(state.trajectories, step))


def _trains(trajectory: Trajectory, step: int, facts: Facts, window_tokens: int) -> bool:
    """True if the response trains in ``step`` on all tokens that have not trained; with ``whole_groups`` its group decides."""
    if trajectory.finished or facts.whole_groups:
        return not facts.whole_groups
    untrained = trajectory.training_tokens(step)
    is_first = untrained == trajectory.num_generated_tokens
    # The first window of training is shorter by as much as the first window.
    jitter = window_tokens - trajectory.first_window_tokens if is_first and trajectory.first_window_tokens else 0
    # The own tokens of a step that trained end the walk back over deferred steps, so a step without any does not train.
    return untrained >= facts.training_window_tokens - jitter and trajectory.window_tokens(step) > 0
