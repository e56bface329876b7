"""Runs a step's updates: passes over a batch in shuffled mini-batches, and their combined metrics."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.training.batching import split_minibatches
from megatron_rl.training.engine import UpdateResult
from megatron_rl.training.losses import counted_tokens, critic_denominators, policy_denominators
from megatron_rl.training.trainer_group import TrainerGroup

_SHORT_NAMES = {"policy_loss": "loss", "value_loss": "loss", "approx_kl_k3": "kl"}
"""Metrics that the prefix makes unambiguous under a shorter name."""


def train_policy(
    config: Config, group: TrainerGroup, batch: PackedBatch, step: int, *, keeps_logprobs: bool = False
) -> tuple[dict[str, float], Tensor | None]:
    """Train one pass over the window's tokens; denominators cover the whole mini-batch. Returns metrics and log-probs.

    ``keeps_logprobs``: the first update uses its own log-probs as the old ones, and returns them: [T], 0 outside its sequences.
    """
    results: list[UpdateResult] = []
    kept: Tensor | None = None
    temperature, counts = config.rollout.temperature, counted_tokens(batch)
    useful = np.any(np.stack(list(counts.values())) > 0, axis=0)
    for number, rows in enumerate(policy_minibatches(config, batch.num_sequences, step)):
        keeps = keeps_logprobs and number == 0
        read = _without(batch, "old_logprobs" if keeps else "window")
        rows = rows if keeps else [row for row in rows if useful[row]]
        denominators = policy_denominators(batch, config.algorithm, rows, counts)
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
            wanted = batch.fields.get("window", batch.fields["mask"])
            kept = group.logprobs(batch.with_fields(mask=wanted), rows, temperature=temperature)
    return update_metrics("policy", results), kept


def _without(batch: PackedBatch, field: str) -> PackedBatch:
    return replace(batch, fields={name: values for name, values in batch.fields.items() if name != field})


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


def planned_updates(config: Config, ids: Sequence[int], ended: Sequence[int], step: int) -> dict[str, list[list[int]]]:
    """Return, by engine, the sequence ids of each update of the step; the critic learns from ``ended``."""
    of_policy, of_critic = policy_minibatches(config, len(ids), step), critic_minibatches(config, len(ended), step)
    return {
        "policy": [[ids[row] for row in rows] for rows in of_policy],
        "critic": [[ended[row] for row in rows] for rows in of_critic],
    }


def policy_minibatches(config: Config, num_sequences: int, step: int) -> list[list[int]]:
    """Return the indices of the batch's sequences for each update of the policy."""
    return _minibatches(config, num_sequences, config.batch.policy_minibatch_size, 1, step)


def critic_minibatches(config: Config, num_sequences: int, step: int) -> list[list[int]]:
    """Return the indices of the batch's sequences for each update of the critic, over all its epochs."""
    return _minibatches(config, num_sequences, config.batch.critic_minibatch_size, config.critic.num_epochs, step)


def _minibatches(config: Config, num_sequences: int, size: int, num_epochs: int, step: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(config.run.seed * 1_000_003 + step)
    return [part for _ in range(num_epochs) for part in split_minibatches(num_sequences, size, generator)]


def update_metrics(prefix: str, results: Sequence[UpdateResult]) -> dict[str, float]:
    """Return means over a step's updates, each metric over its own denominator; empty if there was no update."""
    if not results:
        return {}
    sums: dict[str, list[float]] = {}
    for result in results:
        for name, (total, denominator) in result.metrics.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0], pair[1] = pair[0] + total, pair[1] + denominator
    metrics = {
        f"{prefix}/{_SHORT_NAMES.get(name, name)}": total / denominator
        for name, (total, denominator) in sums.items()
        if denominator
    }
    metrics[f"{prefix}/grad_norm"] = max(r.grad_norm for r in results)
    metrics[f"{prefix}/lr"] = results[-1].lr
    metrics[f"{prefix}/num_updates"] = float(sum(not r.skipped for r in results))
    metrics[f"{prefix}/num_skipped"] = float(sum(r.skipped for r in results))
    for name in results[0].plan:
        total = sum(result.plan[name] for result in results)
        metrics[f"perf/{prefix}_{name}"] = total if name.startswith("num_") else total / len(results)
    return metrics
