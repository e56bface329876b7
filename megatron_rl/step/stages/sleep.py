"""Puts colocated servers to sleep, which releases their memory for the trainer."""

from megatron_rl.rollout.service import RolloutService
from megatron_rl.step.state import StepState


def run(step: int, state: StepState, *, rollout: RolloutService) -> None:
    rollout.sleep()
