"""Plans a step's updates as shuffled mini-batches, and combines their metrics.

In some steps the critic trains alone: the first ones of a run (``critic.warmup_steps``), or all steps of a value
pretraining (``CriticWarmup``).
"""

from collections.abc import Mapping, Sequence

import torch

from megatron_rl.algorithms.mismatch import ess_fraction
from megatron_rl.algorithms.value_convergence import ValueConvergence
from megatron_rl.config.schema import Config
from megatron_rl.training.batching import split_minibatches
from megatron_rl.training.engine import UpdateResult

_SHORT_NAMES = {"policy_loss": "loss", "value_loss": "loss", "approx_kl_k3": "kl"}
"""Metrics that the prefix makes unambiguous under a shorter name."""


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
    # The step alone determines the order, so the planned mini-batches are those of the updates, also after a resume.
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
    if "ratio_square_mean" in sums:
        mean_square = metrics.pop(f"{prefix}/ratio_square_mean", 0.0)
        metrics[f"{prefix}/ess"] = ess_fraction(metrics[f"{prefix}/ratio_mean"], mean_square) if mean_square else 1.0
    metrics[f"{prefix}/grad_norm"] = max(r.grad_norm for r in results)
    metrics[f"{prefix}/lr"] = results[-1].lr
    metrics[f"{prefix}/num_updates"] = float(sum(not r.skipped for r in results))
    metrics[f"{prefix}/num_skipped"] = float(sum(r.skipped for r in results))
    for name in results[0].plan:
        total = sum(result.plan[name] for result in results)
        metrics[f"perf/{prefix}_{name}"] = total if name.startswith("num_") else total / len(results)
    return metrics


class CriticWarmup:
    """Decides in which steps the policy is frozen, and when the critic of a value pretraining has converged."""

    def __init__(self, config: Config, convergence: ValueConvergence | None = None) -> None:
        """``convergence``: the test that ends a value pretraining, once the critic's metrics are flat; None otherwise."""
        self.convergence = convergence
        # In a pretraining the policy never trains.
        self._num_steps = config.run.num_steps if convergence else config.critic.warmup_steps

    @property
    def never_ends(self) -> bool:
        return self.convergence is not None

    def policy_rests(self, step: int) -> bool:
        return step < self._num_steps

    def critic_converged(self, metrics: Mapping[str, float]) -> bool:
        """Add a step's metrics; return True once the critic of a value pretraining has converged."""
        if self.convergence is None:
            return False
        return self.convergence.update(metrics["critic/loss"], metrics["critic/explained_variance"])
