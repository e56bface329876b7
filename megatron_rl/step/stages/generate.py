"""New tokens of every slot: one window, or full responses."""

import asyncio
import os

from megatron_rl.config.schedule_facts import Facts
from megatron_rl.config.schema import Config, RoutingReplay
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.run.recorder import Recorder
from megatron_rl.step.collect import Collector
from megatron_rl.step.packing import window_batch, window_routes, with_routes
from megatron_rl.step.stage_facts import ChildCpuClock
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
    # Copies: the next window may be generated before this one has trained.
    state.slots = [t if t.finished else t.frozen_copy() for t in slots]
    used_s = children.cpu_s() - before_s
    recorder.log_stage_facts("generate", step, cpu_s=used_s, cores=os.cpu_count() or 1, rounds=collector.rounds)
    state.trajectories = [t for t in state.slots if t.window_tokens(step) and not t.greedy]
    if facts.whole_groups:
        state.trajectories = collector.ended_groups(step)
    elif facts.whole_responses:
        state.trajectories = [t for t in state.trajectories if t.finished]
    # Reading images would block the event loop, so the batch is built on a thread.
    state.batch = await asyncio.to_thread(window_batch, state.trajectories, facts.trained_window(step), vision)
    if config.policy.moe.routing_replay is RoutingReplay.R3:
        state.batch = with_routes(state.batch, window_routes(state.trajectories, step))
