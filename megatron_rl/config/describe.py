"""Batch arithmetic of a configuration, printed at start."""

import math

from megatron_rl.config.derived import max_new_tokens, needs_critic, num_responses_per_step
from megatron_rl.config.layout import critic_layout, ranks_of_replica
from megatron_rl.config.schedule_facts import facts_of, max_trained_windows, max_windows
from megatron_rl.config.schema import Config, ParallelConfig


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    return world_size // ranks_of_replica(parallel)


def batch_arithmetic(config: Config, world_size: int) -> dict[str, tuple[str, str, str]]:
    """Quantities of a step: name -> (over all ranks, on one data-parallel rank, in one micro-batch).

    The numbers are upper bounds if lengths vary.
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

    def row(total: int, unit: int, bound: str = "", ranks: int = ranks) -> tuple[str, str, str]:
        return f"{bound}{total:,}", f"{bound}{math.ceil(total / ranks):,}", f"up to {unit:,}" if unit else "-"

    per_micro = max(1, budget // longest)
    updates = f"{math.ceil(samples / minibatch):,}"
    rows = {
        "prompts": row(samples // smallest, 0, "up to " if batch.num_samples_by_type else ""),
        "samples (slots)": row(samples, per_micro),
        "new tokens (window)": row(samples * new_tokens, min(budget, per_micro * new_tokens), "up to "),
        "trained sequence tokens": row(samples * longest, max(budget, longest), "up to "),
        "samples per policy update": row(minibatch, per_micro),
        "policy updates": (updates, updates, "-"),
        "windows of the longest response": (f"{max_windows(config):,}", "-", "-"),
        "oldest trained token (weight versions)": (_largest_staleness(config), "-", "-"),
    }
    if needs_critic(config):
        critic_minibatch = min(batch.critic_minibatch_size, samples)
        rows["samples per critic update"] = row(critic_minibatch, per_micro, "up to ", critic_ranks)
    return rows


def _largest_staleness(config: Config) -> str:
    """Text of the largest number of policy updates between the weights that sample a token and the update that it trains."""
    facts = facts_of(config)
    updates = max_trained_windows(config) - 1 + facts.ahead
    # Aborted windows are shorter, and the responses of a group may start in different steps.
    is_open = facts.whole_groups or config.rollout.over_sampling > 1
    return f"{updates} or more" if is_open and facts.windows and facts.training_window_tokens > 1 else f"{updates}"
