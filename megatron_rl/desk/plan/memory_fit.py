"""Decides whether a run fits a GPU, and which keys to change if it does not. Pure.

Changes are tried with the memory model itself (``run_memory``), cheapest first; then the unnecessary ones are removed.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.derived import shares_devices
from megatron_rl.config.layout import experts_problem, layers_problem, layout_problems, unsplit_problem
from megatron_rl.config.schema import Config, Dtype, Moments, Offload, Recompute
from megatron_rl.desk.costs.gpus import Gpu
from megatron_rl.desk.costs.run_memory import RunMemory, RunModel, memory_fraction, models_of, run_memory, with_kv_cache
from megatron_rl.desk.costs.serving_time import kv_bytes
from megatron_rl.desk.plan.layout_search import cut_layers
from megatron_rl.families.family import ModelConfig, family_of
from megatron_rl.families.model_facts import dims, split_sizes, text_config
from megatron_rl.schedule.table import GENERATE

SPARE_SHARE = 0.04
"""Share of a GPU that a recommended mem-fraction-static and a plan leave free."""
_SMALLEST_FRACTION, LARGEST_FRACTION = 0.1, 0.9
_GROWTH = (2, 4, 8)

Facts = Mapping[str, ModelConfig]
Changes = Mapping[str, Any]
"""Maps dotted keys to values."""


@dataclass(frozen=True)
class MemoryFit:
    """A run's memory on one GPU type."""

    stage: str
    """The stage that needs most memory."""
    needed: float
    """Bytes per GPU in that stage; colocated servers count with all memory that mem-fraction-static grants."""
    kv_tokens: float
    """Tokens that fit into one server's KV cache; 0 or less if its weights do not fit."""
    problem: str
    """Reason why the run does not fit, or an empty string."""
    changes: Changes
    """Changes that make the run fit; empty if it fits, or if none were found."""
    needed_after: float


def check_fit_with_fixes(config: Config, facts: Facts, gpu: Gpu) -> MemoryFit:
    """Fit of ``config``, with changes that help. parallel.num_ranks is set, and the layouts fit it; ``facts`` as for ``models_of``."""
    found = check_fit(config, facts, gpu)
    changes = _remedy(config, facts, gpu) if found.problem else {}
    return replace(found, changes=changes, needed_after=check_fit(changed(config, changes), facts, gpu).needed)


def check_fit(config: Config, facts: Facts, gpu: Gpu) -> MemoryFit:
    """Compare the fullest stage with the GPU's memory, and the longest sequence with a server's KV cache. Suggests no changes."""
    memory = run_memory(config, models_of(config, facts))
    fullest = max(with_kv_cache(config, memory, gpu.hbm_bytes).stages, key=lambda stage: stage.total)
    stage, needed = fullest.name, fullest.total
    size, longest = config.rollout.tensor_parallel_size, config.batch.max_prompt_tokens + config.batch.max_response_tokens
    tokens = (memory_fraction(config) * gpu.hbm_bytes - memory.server_weights) / kv_bytes(facts["policy"], size)
    problem = ""
    if needed > gpu.hbm_bytes:
        problem = f"{(needed - gpu.hbm_bytes) / 1e9:.1f} GB too much"
    elif tokens < longest:
        problem = f"a server's KV cache is too small for a response of {longest:,} tokens"
    return MemoryFit(stage, needed, tokens, problem, {}, needed)


def _remedy(config: Config, facts: Facts, gpu: Gpu) -> Changes:
    """Return changes that make the run fit; empty if no known change helps."""

    def helps(changes: Changes) -> bool:
        other = changed(config, changes)
        return _is_possible(other, facts) and not check_fit(other, facts, gpu).problem

    def needed(changes: Changes) -> Changes:
        # The most expensive change goes first.
        for key in reversed(list(changes)):
            fewer = {name: value for name, value in changes.items() if name != key}
            changes = fewer if helps(fewer) else changes
        return changes

    candidates = list(_candidates(config, facts, gpu))
    changes: Changes = {}
    for candidate in candidates:
        if _is_possible(changed(config, {**changes, **candidate}), facts):
            changes = {**changes, **candidate}
        if helps(changes):
            break
    else:
        return {}
    changes = needed(changes)
    # Among several values, the smallest that helps is tried last and kept.
    for candidate in reversed(candidates):
        if candidate.keys() <= changes.keys() and helps({**changes, **candidate}):
            changes = {**changes, **candidate}
    changes = needed(changes)
    number = changed(config, changes).rollout.num_servers
    return {**changes, **({"rollout.num_servers": number} if number != config.rollout.num_servers else {})}


def _candidates(config: Config, facts: Facts, gpu: Gpu) -> Iterator[Changes]:
    """Changes in order of their cost, cheapest first: seconds of copying, a third more computation, rounding, other layouts, more ranks."""
    yield from ({f"{name}.offload": Offload.auto} for name in ("policy", "critic"))
    yield from _of_servers(config, facts, gpu)
    yield {"policy.recompute": Recompute.full}
    yield {"critic.recompute": Recompute.full}
    yield {"batch.max_tokens_per_microbatch": config.batch.max_prompt_tokens + config.batch.max_response_tokens}
    if config.policy.dtype is Dtype.bfloat16:
        yield from ({f"{name}.optimizer.moments": Moments.bfloat16} for name in ("policy", "critic"))
    parallel = config.parallel
    for times in _GROWTH:
        size = parallel.tensor_parallel_size * times
        # Experts stay whole: splitting an expert costs more than distributing whole experts.
        experts = {"parallel.expert_tensor_parallel_size": 1} if parallel.expert_parallel_size > 1 else {}
        if size <= gpu.per_machine:
            yield {"parallel.tensor_parallel_size": size, "parallel.sequence_parallel": True, **experts}
    yield from ({"parallel.expert_parallel_size": parallel.expert_parallel_size * times} for times in _GROWTH)
    for times in _GROWTH:
        stages, layers = parallel.pipeline_parallel_size * times, text_config(facts["policy"]).num_hidden_layers
        cut = {"parallel.pipeline_layers": cut_layers(layers, stages * parallel.virtual_pipeline_size)}
        uneven = cut if any(cut.values()) or parallel.pipeline_layers else {}
        yield {"parallel.pipeline_parallel_size": stages, **uneven}
    yield from ({"parallel.num_ranks": parallel.num_ranks * times} for times in _GROWTH)


def _of_servers(config: Config, facts: Facts, gpu: Gpu) -> Iterator[Changes]:
    """Changes that leave more memory to the servers or to the trainer."""
    size = config.rollout.tensor_parallel_size
    if fraction := largest_fraction(run_memory(config, models_of(config, facts)), gpu):
        yield {"rollout.server_args.mem-fraction-static": fraction}
    yield from ({"rollout.tensor_parallel_size": size * times} for times in _GROWTH)


def largest_fraction(
    memory: RunMemory, gpu: Gpu, *, spare: float = SPARE_SHARE, smallest: float = _SMALLEST_FRACTION
) -> float:
    """mem-fraction-static in hundredths for servers that use the memory that the trainer leaves; 0 if that is below ``smallest``."""
    fraction = LARGEST_FRACTION
    for stage in memory.stages:
        if stage.name == GENERATE:
            others = stage.total - memory.server_weights
            fraction = min(fraction, 1 - spare - others / gpu.hbm_bytes)
    return int(fraction * 100) / 100 if fraction >= smallest else 0.0


def changed(config: Config, changes: Changes) -> Config:
    """``config`` with ``changes``. The number of managed colocated servers follows the number of ranks."""
    other = copy.deepcopy(config)
    for key, value in changes.items():
        section, *path, name = key.split(".")
        owner = getattr(other, section)
        for step in path:
            owner = getattr(owner, step)
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)
    rollout = other.rollout
    if shares_devices(rollout) and not rollout.urls:
        rollout.num_servers = other.parallel.num_ranks // rollout.tensor_parallel_size
    return other


def _is_possible(config: Config, facts: Facts) -> bool:
    """True if the layouts fit the ranks and the models, and colocated servers fit the ranks."""
    rollout, num_ranks = config.rollout, config.parallel.num_ranks
    servers_fit = True
    if shares_devices(rollout):
        servers_fit = (len(rollout.urls) or rollout.num_servers) * rollout.tensor_parallel_size == num_ranks
    return servers_fit and all(_fits(model, num_ranks) for model in models_of(config, facts))


def _fits(model: RunModel, num_ranks: int) -> bool:
    parallel, sizes = model.parallel, dims(model.facts)
    problems = [
        *layout_problems(parallel, num_ranks),
        layers_problem(parallel, text_config(model.facts).num_hidden_layers),
        experts_problem(parallel, sizes["experts"], sizes["expert_ffn"]),
        unsplit_problem(parallel, family_of(model.facts).unsplit),
    ]
    return not any(problems) and not any(size % parallel.tensor_parallel_size for size in split_sizes(model.facts).values())
