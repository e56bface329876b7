"""The critic's updates: the value loss on finished responses, over all their windows."""

from collections.abc import Callable

from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.step.metrics import critic_metrics
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup, critic_minibatches, update_metrics
from megatron_rl.training.losses import counted_tokens, critic_denominators
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


def train_critic(config: Config, group: TrainerGroup, batch: PackedBatch, step: int) -> dict[str, float]:
    """Train ``critic.num_epochs`` passes over whole responses. Returns metrics."""
    results = []
    counts = counted_tokens(batch)
    useful = counts["mask"] > 0
    for rows in critic_minibatches(config, batch.num_sequences, step):
        rows = [row for row in rows if useful[row]]
        denominators = critic_denominators(batch, config.algorithm, rows, counts)
        if denominators["mask"]:
            results.append(group.update("critic", batch, rows, objective="critic", denominators=denominators))
    return update_metrics("critic", results)
