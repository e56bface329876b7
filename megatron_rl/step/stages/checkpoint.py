"""Examines the step's health, and saves weights, optimizers, pool and sampler if a checkpoint is due."""

from megatron_rl.run.checkpoints import PolicyExporter
from megatron_rl.step.health_guard import HealthGuard
from megatron_rl.step.state import StepState
from megatron_rl.step.step_saver import StepSaver


def run(step: int, state: StepState, *, health: HealthGuard, policy_exporter: PolicyExporter, saver: StepSaver) -> None:
    health.examine(step, state)
    policy_exporter.keep_if_due(step, state.trained_s)
    saver.save_if_due(step, state)
