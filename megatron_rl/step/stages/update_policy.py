"""The policy's updates: the policy loss on the window's tokens, once the critic is warm."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.config.schema import Config, KlPlace
from megatron_rl.data.batch import PackedBatch
from megatron_rl.rollout.service import RolloutService
from megatron_rl.run.recorder import Recorder
from megatron_rl.step.evaluation import EvaluationServers
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loss_batches import mismatch
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup, policy_minibatches, update_metrics
from megatron_rl.training.engine import UpdateResult
from megatron_rl.training.losses import counted_tokens, kept_tokens, policy_denominators
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


def train_policy(
    config: Config, group: TrainerGroup, batch: PackedBatch, step: int, *, keeps_logprobs: bool = False
) -> tuple[dict[str, float], Tensor | None]:
    """Train one pass over the window's tokens; denominators cover the whole mini-batch. Returns metrics and log-probs.

    ``keeps_logprobs``: the first update uses its own log-probs as the old ones, and returns them: [T], 0 outside its sequences.
    """
    results: list[UpdateResult] = []
    kept: Tensor | None = None
    temperature, counts = config.rollout.temperature, counted_tokens(batch)
    selects, num_selecting = register.POLICY_LOSSES.find(config.algorithm.policy_loss).selects is not None, 0
    useful = np.any(np.stack(list(counts.values())) > 0, axis=0)
    for number, rows in enumerate(policy_minibatches(config, batch.num_sequences, step)):
        keeps = keeps_logprobs and number == 0
        read = _without(batch, "old_logprobs" if keeps else "window")
        # An update that computes old log-probs needs all rows; later updates read them from all of its sequences.
        rows = rows if keeps else [row for row in rows if useful[row]]
        denominators = policy_denominators(batch, config.algorithm, rows, counts)
        if selects and denominators["mask"]:
            # A forward pass of this update's weights: the choice is over the whole mini-batch, which no rank sees.
            current = group.logprobs(batch, rows, temperature=temperature)
            read = read.with_fields(kept=kept_tokens(config.algorithm, current, batch, rows))
            num_selecting += int(batch.lengths[rows].sum())
        if denominators["mask"]:
            results.append(
                group.update(
                    "policy",
                    read,
                    rows,
                    objective="policy",
                    denominators=denominators,
                    temperature=temperature,
                    keeps_logprobs=keeps,
                )
            )
            kept = results[-1].logprobs if keeps else kept
        elif keeps:
            # No token trains, so no update computes the log-probs that the metrics read.
            wanted = batch.fields.get("window", batch.fields["mask"])
            kept = group.logprobs(batch.with_fields(mask=wanted), rows, temperature=temperature)
    selecting = {"perf/policy_num_selecting_tokens": float(num_selecting)} if num_selecting else {}
    return update_metrics("policy", results) | selecting, kept


def _without(batch: PackedBatch, field: str) -> PackedBatch:
    return replace(batch, fields={name: values for name, values in batch.fields.items() if name != field})


def finish_own_logprobs(config: Config, state: StepState, old_logprobs: Tensor, kl_penalty: KlPenalty) -> None:
    """Add the ``old_logprobs`` [T] of the first update, and compute the metrics that needed them."""
    state.old_logprobs = state.old_logprobs + old_logprobs  # each is 0 on the other's tokens
    found = mismatch(state.batch, state.old_logprobs, state.policy_batch.fields["mask"], config.algorithm)
    state.metrics |= {f"mismatch/{name}": value for name, value in found.items()}
    if config.algorithm.kl.place is not KlPlace.none:
        state.metrics |= kl_penalty.measure(state)
