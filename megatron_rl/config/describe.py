"""Batch arithmetic of a configuration, printed at start."""

import math
from dataclasses import dataclass

from megatron_rl.config.derived import (
    effective_window_tokens,
    max_new_tokens,
    max_remainder_tokens,
    needs_critic,
    num_responses_per_step,
)
from megatron_rl.config.layout import critic_layout, ranks_of_replica
from megatron_rl.config.schedule_facts import window_jitter_tokens
from megatron_rl.config.schema import Config, ParallelConfig


@dataclass(frozen=True)
class Quantity:
    """A quantity over all ranks, on one data-parallel rank, and in one micro-batch."""

    name: str
    per_step: str
    per_rank: str
    per_microbatch: str


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    return world_size // ranks_of_replica(parallel)


def _most_windows(config: Config) -> int:
    """Number of steps for a response of the whole budget whose first window is the shortest."""
    window, jitter = effective_window_tokens(config), window_jitter_tokens(config)
    return max(1, math.ceil((config.batch.max_response_tokens + max(jitter - 1, 0) - max_remainder_tokens(window)) / window))


def batch_arithmetic(config: Config, world_size: int) -> list[Quantity]:
    """Compute the quantities of a step; upper bounds if lengths vary.

    A micro-batch has at most max_tokens_per_microbatch tokens. Only the critic's update uses the critic's replicas.
    """
    batch, ranks = config.batch, data_parallel_size(config.parallel, world_size)
    critic_ranks = data_parallel_size(critic_layout(config), world_size)
    samples = num_responses_per_step(config)
    smallest = min([batch.num_samples_per_prompt, *batch.num_samples_by_type.values()])
    new_tokens = max_new_tokens(config)
    longest = batch.max_prompt_tokens + batch.max_response_tokens
    budget = batch.max_tokens_per_microbatch
    minibatch = min(batch.policy_minibatch_size, samples)

    def row(name: str, total: int, unit: int, bound: str = "", ranks: int = ranks) -> Quantity:
        return Quantity(
            name, f"{bound}{total:,}", f"{bound}{math.ceil(total / ranks):,}", f"up to {unit:,}" if unit else "-"
        )

    per_micro = max(1, budget // longest)
    updates = f"{math.ceil(samples / minibatch):,}"
    rows = [
        row("prompts", samples // smallest, 0, "up to " if batch.num_samples_by_type else ""),
        row("samples (slots)", samples, per_micro),
        row("new tokens (window)", samples * new_tokens, min(budget, per_micro * new_tokens), "up to "),
        row("trained sequence tokens", samples * longest, max(budget, longest), "up to "),
        row("samples per policy update", minibatch, per_micro),
        Quantity("policy updates", updates, updates, "-"),
        Quantity("windows of the longest response", f"{_most_windows(config):,}", "-", "-"),
    ]
    if needs_critic(config):
        rows.append(
            row(
                "samples per critic update",
                min(batch.critic_minibatch_size, samples),
                per_micro,
                "up to ",
                critic_ranks,
            )
        )
    return rows
