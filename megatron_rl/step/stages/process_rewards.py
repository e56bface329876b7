"""Rewards at line ends, from a process reward model."""

from dataclasses import replace

from megatron_rl.rewards.line_rewards import ProcessRewarder, values_after_tokens
from megatron_rl.step.packing import response_field
from megatron_rl.step.state import StepState
from megatron_rl.training.trainer_group import TrainerGroup


def run(step: int, state: StepState, *, group: TrainerGroup, process_rewarder: ProcessRewarder) -> None:
    whole = replace(state.batch, spans=None)
    after = values_after_tokens(whole, *group.values(whole, engine="process"))
    state.line_rewards = response_field(process_rewarder.dense_rewards(state.trajectories, after), state.trajectories)
