"""The critic's updates: the value loss on finished responses, over all their windows."""

from collections.abc import Callable

from megatron_rl.config.schema import Config
from megatron_rl.step.metrics import critic_metrics
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import train_critic
from megatron_rl.step.warmup import CriticWarmup
from megatron_rl.training.trainer_group import TrainerGroup


def run(
    step: int, state: StepState, *, config: Config, group: TrainerGroup, warmup: CriticWarmup, stop_after: Callable[[int], None]
) -> None:
    if state.critic_batch is None:
        return
    state.metrics |= train_critic(config, group, state.critic_batch, step)
    state.metrics |= critic_metrics(state.critic_batch)
    if warmup.critic_converged(state.metrics):
        stop_after(step)
