"""Estimates the costs of a run without measurements: from the model's config.json, the layout and a GPU's peaks. Pure.

The formulas are in ``megatron_rl.desk.costs``; docs/estimates.md compares them with published measurements.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from megatron_rl.config.derived import bucket_bytes, needs_critic, needs_reference, shares_devices
from megatron_rl.config.layout import critic_layout, layout_problems, ranks_of_replica
from megatron_rl.config.schema import Config, Offload, ParallelConfig, Recompute
from megatron_rl.desk.costs.gpus import Gpu
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.rank_memory import PassSettings, memory_by_rank, parameter_bytes
from megatron_rl.desk.costs.run_memory import memory_fraction
from megatron_rl.desk.costs.serving_time import decode_curve, kv_bytes, kv_tokens, prefill_seconds
from megatron_rl.desk.costs.training_time import REINFORCEMENT, publish_seconds, training_seconds
from megatron_rl.desk.simulate.timing import Decode, LinearCost, Timing
from megatron_rl.errors import ConfigError
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.model_facts import as_config, read_model_json
from megatron_rl.schedule.table import ROWS, DeviceWork, StageRow

_NODES = tuple(2.0**power for power in range(13))
"""Numbers of running responses between which a decode step's time is interpolated linearly."""
_HOST_BANDWIDTH = 25e9
"""Bytes per second between a GPU and pinned host memory, all GPUs of a node at once: 16 lanes of PCIe 4 at 80 % of their peak."""


def estimated_timing(config: Config, gpu: Gpu, facts: ModelConfig | None = None) -> Timing:
    """Estimate a run's costs. ``facts``: the policy's model facts, read from policy.path if None.

    Raises ConfigError for an incomplete configuration, ModelError for an invalid model in policy.path.
    """
    parallel = config.parallel
    if not parallel.num_ranks:
        raise ConfigError("parallel.num_ranks=0: expected the number of trainer ranks, which the estimate needs")
    if problems := [*layout_problems(parallel, parallel.num_ranks)]:
        raise ConfigError("\n".join(problems))
    model = facts or _model(config)
    critic = critic_layout(config)

    def passes(number: float, layout: ParallelConfig = parallel) -> LinearCost:
        return _passes(model, gpu, layout, number, parallel.num_ranks, config.batch.max_tokens_per_microbatch)

    forward = {False: passes(1.0), True: passes(1.0, critic)}

    def stage(row: StageRow) -> LinearCost:
        is_critic = row.model in ("critic", "process")  # both use the critic's layout
        match row.work:
            case DeviceWork.none:
                return LinearCost()
            case DeviceWork.forward:
                return forward[is_critic]
            case DeviceWork.update:
                settings, layout = (config.critic, critic) if is_critic else (config.policy, parallel)
                return passes(4.0 if settings.recompute is Recompute.full else 3.0, layout)
            case DeviceWork.send:
                return LinearCost(fixed_s=_publish_s(config, model, gpu))
            case other:
                assert_never(other)

    def with_copies(row: StageRow) -> LinearCost:
        cost = stage(row)
        return replace(cost, fixed_s=cost.fixed_s + _copies_s(config, model, row))

    stages = {row.name: with_copies(row) for row in ROWS if row.work is not DeviceWork.none}
    return replace(server_timing(model, gpu, config.rollout.tensor_parallel_size), stages=stages)


def server_timing(model: ModelConfig, gpu: Gpu, num_gpus: int) -> Timing:
    """Estimate the costs of one server of ``num_gpus`` GPUs."""
    curve = decode_curve(model, gpu, num_gpus=num_gpus)
    # A decode step is linear in the tokens that it reads, so two lengths give its slope.
    context_s = (curve(1, 1000) - curve(1, 0)) / 1000
    return Timing(
        decode=Decode(_NODES, tuple(curve(running, 0) for running in _NODES), context_s),
        prefill=_quadratic(lambda length: prefill_seconds(model, gpu, num_gpus=num_gpus, lengths=[length])),
    )


def estimated_kv_tokens(config: Config, gpu: Gpu, facts: ModelConfig | None = None) -> int:
    """Return the tokens that one server's KV cache holds. Raises ConfigError if its weights do not fit."""
    size, fraction = config.rollout.tensor_parallel_size, memory_fraction(config)
    model = facts or _model(config)
    tokens = int(kv_tokens(model, gpu, num_gpus=size, memory_fraction=fraction))
    if tokens < 1:
        missing = -tokens * kv_bytes(model, size) / 1e9
        raise ConfigError(
            f"rollout.tensor_parallel_size={size}: the model's weights leave no room for a KV cache, {missing:.0f} GB too "
            f"much on each GPU with mem-fraction-static {fraction:g}; raise one of these two keys"
        )
    return tokens


def _model(config: Config) -> ModelConfig:
    if not (Path(config.policy.path) / "config.json").is_file():
        raise ConfigError(
            f"policy.path={config.policy.path!r}: expected a folder with the model's config.json, which the estimate needs"
        )
    return as_config(read_model_json(config.policy.path))


def _passes(
    model: ModelConfig, gpu: Gpu, layout: ParallelConfig, number: float, num_ranks: int, pack_tokens: int
) -> LinearCost:
    """Return the cost of ``number`` forward passes on all ranks. Filling and draining a pipeline is a separate fixed cost."""

    def seconds(length: int, ranks: int = num_ranks) -> float:
        return training_seconds(model, layout, gpu, [length], num_ranks=ranks, passes=number, efficiency=REINFORCEMENT)

    cost = _quadratic(seconds)
    per_pack = cost.token_s * pack_tokens * num_ranks / ranks_of_replica(layout)
    fill_s = per_pack * (layout.pipeline_parallel_size - 1) / layout.virtual_pipeline_size
    once = {"update_s": fill_s} if number >= 3 else {"fixed_s": fill_s}
    return LinearCost(token_s=cost.token_s, square_s=cost.square_s, **once)


def _copies_s(config: Config, model: ModelConfig, row: StageRow) -> float:
    """Return the seconds in which the stage's model comes from host memory and, if it changes, returns (``training.model_memory``)."""
    is_critic = row.model in ("critic", "process")
    settings = config.critic if is_critic else config.policy
    is_alone = not (needs_critic(config) or needs_reference(config) or shares_devices(config.rollout))
    if is_alone or settings.offload is Offload.never:
        return 0.0
    updates = row.work is DeviceWork.update
    states = parameter_bytes(config.policy.dtype, settings.optimizer if updates else None, settings.vision, settings.lora)
    layout = critic_layout(config) if is_critic else config.parallel
    ranks = memory_by_rank(model, layout, PassSettings(0), num_ranks=config.parallel.num_ranks, is_critic=is_critic, states=states)
    return (1 + updates) * max(rank.weights + rank.optimizer for rank in ranks) / _HOST_BANDWIDTH


def _quadratic(seconds: Callable[[int], float]) -> LinearCost:
    """Return the token and square costs of a quadratic ``a * length + b * length**2``."""
    length = 1024
    square_s = (seconds(2 * length) - 2 * seconds(length)) / (2 * length**2)
    return LinearCost(token_s=seconds(length) / length - square_s * length, square_s=square_s)


def _publish_s(config: Config, model: ModelConfig, gpu: Gpu) -> float:
    size = config.rollout.tensor_parallel_size
    number = len(config.rollout.urls) or config.rollout.num_servers
    return publish_seconds(
        2 * num_parameters(model),
        gpu,
        # Colocated servers read their shards on the device; the gather before it is the same.
        way="point_to_point" if shares_devices(config.rollout) else "broadcast",
        num_stages=config.parallel.pipeline_parallel_size,
        num_server_gpus=size * number,
        gpus_per_server=size,
        bucket_bytes=bucket_bytes(config.rollout, "cuda"),
    )
