"""The policy's updates: the policy loss on the window's tokens, once the critic is warm."""

from collections.abc import Callable

from torch import Tensor

from megatron_rl.config.schema import Config, KlPlace
from megatron_rl.rollout.service import RolloutService
from megatron_rl.run.recorder import Recorder
from megatron_rl.step.evaluation import EvaluationServers
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loss_batches import mismatch
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import train_policy
from megatron_rl.step.warmup import CriticWarmup
from megatron_rl.training.trainer_group import TrainerGroup


def run(
    step: int,
    state: StepState,
    *,
    config: Config,
    group: TrainerGroup,
    warmup: CriticWarmup,
    kl_penalty: KlPenalty,
    rollout: RolloutService,
    fleet: EvaluationServers | None,
    recorder: Recorder,
    stop_after: Callable[[int], None],
    store_samples: Callable[[StepState, int], None],
) -> None:
    if not warmup.policy_rests(step):
        metrics, old = train_policy(config, group, state.policy_batch, step, keeps_logprobs=bool(state.first_update))
        if metrics:
            rollout.weights_changed()
            if fleet is not None:
                fleet.rollout.weights_changed()
        state.metrics |= metrics
        if old is not None:
            finish_own_logprobs(config, state, old, kl_penalty)
    store_samples(state, step)
    state.trained_s = recorder.elapsed_s
    if 0 < config.run.stop_after_s <= state.trained_s:
        stop_after(step)


def finish_own_logprobs(config: Config, state: StepState, old_logprobs: Tensor, kl_penalty: KlPenalty) -> None:
    """Add the ``old_logprobs`` [T] of the first update, and compute the metrics that needed them."""
    state.old_logprobs = state.old_logprobs + old_logprobs  # each is 0 on the other's tokens
    found = mismatch(state.batch, state.old_logprobs, state.policy_batch.fields["mask"], config.algorithm)
    state.metrics |= {f"mismatch/{name}": value for name, value in found.items()}
    if config.algorithm.kl.place is not KlPlace.none:
        state.metrics |= kl_penalty.measure(state)
