"""Publishes the policy to every server; if no token trained the policy, the servers only wake."""

from megatron_rl.config.schedule_facts import Facts
from megatron_rl.data.slots import SlotPool
from megatron_rl.rollout.service import RolloutService
from megatron_rl.step.evaluation import EvaluationServers, Evaluator
from megatron_rl.step.health_guard import HealthGuard
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.state import StepState
from megatron_rl.step.step_saver import snapshot_slots
from megatron_rl.system.processes.gc_pauses import gc_between_windows


def run(
    step: int,
    state: StepState,
    *,
    facts: Facts,
    rollout: RolloutService,
    pool: SlotPool,
    kl_penalty: KlPenalty,
    health: HealthGuard,
    evaluator: Evaluator,
    fleet: EvaluationServers | None,
) -> None:
    gc_between_windows(step)
    if not facts.in_flight:
        snapshot_slots(step, state, pool, kl_penalty)
    if "policy/num_updates" in state.metrics:
        result = rollout.publish()
        state.metrics |= {
            "sync/seconds": result.seconds,
            "sync/version": float(rollout.weight_version),
            "sync/bytes": float(result.num_bytes),
            "sync/buffer_bytes": float(result.buffer_bytes),
        }
        health.check_parity(step, state)
    else:
        rollout.wake()
    if fleet is not None and evaluator.due(step):
        fleet.take(step, evaluator)
