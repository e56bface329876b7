"""Searches layouts of trainer and servers that fit a number of GPUs. Pure.

Memory is computed as in the dry run. Among fitting settings the fastest are kept: a layout recomputes and offloads no more than
necessary, and splits tensors and contexts no further than that requires. All other layouts are counted by the reason for refusal,
with the nearest miss.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, product
from operator import attrgetter
from typing import Any

from megatron_rl.config.derived import needs_critic, server_placement
from megatron_rl.config.layout import ranks_of_replica
from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config, Offload, ParallelConfig, Placement, Recompute
from megatron_rl.desk.costs.gpus import Gpu
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.rank_memory import PassSettings, memory_by_rank, parameter_bytes
from megatron_rl.desk.costs.run_memory import memory_fraction, models_of, run_memory
from megatron_rl.desk.costs.serving_time import kv_bytes
from megatron_rl.desk.plan.layout_search import (
    STAGES,
    LayoutFamily,
    ModelShape,
    cut_layers,
    expert_sizes,
    layout_refusal,
    layouts,
    shape_of,
)
from megatron_rl.desk.plan.memory_fit import LARGEST_FRACTION, SPARE_SHARE, check_fit, largest_fraction
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.sglang_limits import split_problems
from megatron_rl.schedule.table import UPDATE_POLICY

CHOSEN = (
    *("parallel.tensor_parallel_size", "parallel.pipeline_parallel_size", "parallel.virtual_pipeline_size"),
    *("parallel.context_parallel_size", "parallel.expert_parallel_size", "parallel.expert_tensor_parallel_size"),
    *("parallel.num_ranks", "policy.recompute", "policy.offload", "critic.recompute", "critic.offload"),
    *("rollout.placement", "rollout.tensor_parallel_size", "rollout.num_servers"),
    *("batch.window_tokens", "batch.max_tokens_per_microbatch"),
)
"""Keys that a plan chooses, except pinned ones."""
_PACK = "batch.max_tokens_per_microbatch"
_FRACTION_KEY = "mem-fraction-static"
_FRACTION_KEYS = {_FRACTION_KEY, _FRACTION_KEY.replace("-", "_")}
_SERVER_FRACTION, _LEAST_FRACTION = 0.8, 0.01
"""Memory fractions of servers on separate GPUs: the process groups for weights allocate memory after the cache is sized."""
_LEAST_PACK, _MOST_SHARES = 8192, 8
MOST_MACHINES = 8
"""Most nodes that one server may span."""
_CHUNKS, _RECOMPUTES = (4, 2), list(Recompute)
TOO_MANY, FEW_SLOTS = "too little memory in the stage ", "more replicas than responses of an update"
NO_CACHE = "no room in a server for one response"


@dataclass
class RefusedLayouts:
    """The layouts that one reason excludes."""

    number: int = 0
    excess: float = math.inf
    """Bytes per GPU by which the nearest layout exceeds ``PlanSearch.room``; infinite if the reason is not memory."""
    nearest: Config | None = None


@dataclass
class PlanSearch:
    """The inputs of a search, and the layouts refused so far."""

    config: Config
    """Configuration with all keys that a plan does not choose."""
    facts: Mapping[str, ModelConfig]
    """Model facts, as in ``models_of``."""
    gpu: Gpu
    pinned: frozenset[str] = frozenset()
    """Keys of ``CHOSEN`` that keep their values in ``config``."""
    refused: dict[str, RefusedLayouts] = field(default_factory=dict)
    settled: dict[Any, tuple[int, tuple[Recompute, Offload, int]]] = field(default_factory=dict)
    """Maps a layout to its last number of ranks and the settings with which it fitted."""
    shape: ModelShape = field(init=False)

    def __post_init__(self) -> None:
        self.shape = shape_of(self.facts["policy"])

    def allows(self, config: Config, section: str) -> bool:
        """True if ``config`` keeps the pinned values of a section or key."""
        keys = (key for key in self.pinned if key.startswith(section))
        return all(attrgetter(key)(config) == attrgetter(key)(self.config) for key in keys)

    def refuse(self, reason: str, config: Config, excess: float = math.inf) -> None:
        found = self.refused.setdefault(reason, RefusedLayouts())
        found.number += 1
        if found.nearest is None or excess < found.excess:
            found.nearest, found.excess = config, excess

    @property
    def room(self) -> float:
        """Bytes of a GPU that a plan may fill, less than all because estimates are not exact."""
        return (1 - SPARE_SHARE) * self.gpu.hbm_bytes

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its response."""
        return self.config.batch.max_prompt_tokens + self.config.batch.max_response_tokens


@dataclass(frozen=True)
class GpuSplit:
    """How GPUs are divided, with the trainers and the servers that fit their parts."""

    trainers: tuple[Config, ...]
    servers: tuple[Config, ...]
    """Configurations of the servers; empty if servers share the trainer's GPUs and are part of ``trainers``."""


def splits(search: PlanSearch, num_gpus: int) -> Iterator[GpuSplit]:
    """Yield all fitting splits, colocated servers first. Raises ConfigError for an invalid mem-fraction-static."""
    if trainers := tuple(_colocated(search, num_gpus)):
        yield GpuSplit(trainers, ())
    for num_ranks in _trainer_shares(num_gpus, search.gpu.per_machine):
        servers = tuple(_servers(search, num_ranks, num_gpus - num_ranks))
        trainers = tuple(_trainers(search, servers[0])) if servers else ()
        if trainers:
            yield GpuSplit(trainers, servers)


def fewest_gpus(search: PlanSearch, most: int = 4096) -> int:
    """Return the fewest GPUs that some layout fits, in whole nodes beyond one node; 0 if ``most`` are not enough."""
    counting, per_machine = replace(search, refused={}, settled={}), search.gpu.per_machine
    policy = models_of(search.config, search.facts)[0]
    states = sum(parameter_bytes(policy.dtype, policy.settings.optimizer, policy.settings.vision)[:3])
    least = states * num_parameters(policy.facts) / search.gpu.hbm_bytes
    if policy.number_bytes * num_parameters(policy.facts) > search.gpu.hbm_bytes * per_machine * MOST_MACHINES:
        return 0
    numbers = (number for number in (*range(1, per_machine), *_machines(per_machine, most)) if number >= least)
    return next((number for number in numbers if _anything_fits(counting, number)), 0)


def _machines(per_machine: int, most: int) -> Iterator[int]:
    """Yield multiples of a node's GPUs; steps grow to a sixteenth of the total for many nodes."""
    number = per_machine
    while number <= most:
        yield number
        number += per_machine * max(1, number // (16 * per_machine))


def _anything_fits(search: PlanSearch, num_gpus: int) -> bool:
    placed = [_colocated(search, num_gpus)]
    for num_ranks in reversed(_trainer_shares(num_gpus, search.gpu.per_machine)):
        servers = next(_servers(search, num_ranks, num_gpus - num_ranks), None)
        placed += [_trainers(search, servers)] if servers else []
    return any(next(trainers, None) is not None for trainers in placed)


def _trainer_shares(num_gpus: int, per_machine: int) -> list[int]:
    """Return numbers of GPUs for training, with the others serving: whole nodes, or eighths of many nodes."""
    if num_gpus <= per_machine:
        return list(range(1, num_gpus))
    machines = num_gpus // per_machine
    parts = min(machines, _MOST_SHARES)
    return sorted({per_machine * round(machines * part / parts) for part in range(1, parts)})


def _colocated(search: PlanSearch, num_gpus: int) -> Iterator[Config]:
    """Yield trainers with colocated servers, which exclude windows ahead."""
    if overlap_of(search.config.schedule) >= Overlap.training:
        return
    sizes = [*_server_sizes(search, num_gpus)]
    ways = [_served(search, Placement.colocated, num_gpus, size, num_gpus // size) for size in reversed(sizes)]
    ways = [way for way in ways if search.allows(way, "rollout.") and _holds_a_response(search, way, LARGEST_FRACTION)]
    # The largest servers hold least on each GPU; what does not fit beside them fits beside none.
    for trainer in _trainers(search, ways[0]) if ways else ():
        yield trainer
        others = (replace(trainer, rollout=way.rollout) for way in ways[1:])
        yield from (fits for other in others if (fits := _fitting(search, other)))


def _servers(search: PlanSearch, num_ranks: int, num_gpus: int) -> Iterator[Config]:
    """Yield servers on ``num_gpus`` separate GPUs with KV cache for a response, spanning several nodes if one is too small."""
    found, per_machine = False, search.gpu.per_machine
    for size in (*_server_sizes(search, num_gpus), *_server_sizes(search, num_gpus, machines=True)):
        if found and size > per_machine:
            return
        config = _served(search, Placement.disaggregated, num_ranks, size, num_gpus // size)
        if search.allows(config, "rollout.") and _holds_a_response(search, config, memory_fraction(config)):
            found = True
            yield config


def _holds_a_response(search: PlanSearch, config: Config, fraction: float) -> bool:
    """True if a server with this memory fraction can hold a response; otherwise the refusal is counted."""
    policy, size = models_of(search.config, search.facts)[0], config.rollout.tensor_parallel_size
    weights = policy.number_bytes * num_parameters(policy.facts) / size
    missing = weights + search.longest * kv_bytes(policy.facts, size) - fraction * search.gpu.hbm_bytes
    if missing > 0:
        search.refuse(NO_CACHE, config, missing)
    return missing <= 0


def _server_sizes(search: PlanSearch, num_gpus: int, *, machines: bool = False) -> Iterator[int]:
    """Yield tensor-parallel sizes of servers that fill ``num_gpus`` GPUs: on one node, or on two or more whole nodes."""
    model, per_machine = vars(search.facts["policy"]), search.gpu.per_machine
    most, smallest = (MOST_MACHINES, 2 * per_machine) if machines else (per_machine, 1)
    for size in (smallest * 2**power for power in range(most.bit_length() - machines)):
        if num_gpus and num_gpus % size == 0 and not any(split_problems(model, size, "")):
            yield size


def _served(search: PlanSearch, placement: Placement, num_ranks: int, size: int, number: int) -> Config:
    rollout = search.config.rollout
    arguments = dict(rollout.server_args)
    if placement is Placement.disaggregated and not _FRACTION_KEYS & arguments.keys():
        arguments[_FRACTION_KEY] = _SERVER_FRACTION
    rollout = replace(
        rollout, placement=placement, urls=[], tensor_parallel_size=size, num_servers=number, server_args=arguments
    )
    return replace(search.config, rollout=rollout, parallel=replace(search.config.parallel, num_ranks=num_ranks))


def _trainers(search: PlanSearch, config: Config) -> Iterator[Config]:
    """Yield fitting trainers; ``config`` sets the number of ranks and the servers."""
    found = False
    per_machine = search.gpu.per_machine
    # Tensors and contexts are shared on one machine wherever that is enough: what a network costs the estimates do not know.
    for reach, stages in product((per_machine, 8 * per_machine), STAGES):
        if found and reach > per_machine:
            return
        whole = list(_of_kind(search, config, LayoutFamily(stages, stride=reach)))
        yield from whole
        found = found or bool(whole)
        if not whole and search.shape.experts:
            for shared in _of_kind(search, config, LayoutFamily(stages, whole=False, stride=reach)):
                found = True
                yield shared


def _of_kind(search: PlanSearch, config: Config, kind: LayoutFamily) -> Iterator[Config]:
    """Yield the trainers of one layout family. More splitting is tried only for less recomputation, its only speed gain."""
    num_ranks, stages = config.parallel.num_ranks, kind.stages
    slowest = Recompute.full
    for experts in expert_sizes(search.shape, num_ranks):
        for parallel in layouts(search.shape, replace(kind, experts=experts), num_ranks, search.gpu.per_machine):
            found = _placed(search, config, parallel, slowest)
            if found is None:
                continue
            yield found
            cuts = ((chunks, cut_layers(search.shape.layers, stages * chunks)) for chunks in (_CHUNKS if stages > 1 else ()))
            more = (replace(parallel, virtual_pipeline_size=chunks, pipeline_layers=layers) for chunks, layers in cuts)
            # The smallest bubble of those that fit.
            yield from islice(filter(None, (_placed(search, config, interleaved, slowest) for interleaved in more)), 1)
            if found.policy.recompute is Recompute.none:
                return
            slowest = _RECOMPUTES[_RECOMPUTES.index(found.policy.recompute) - 1]


def _placed(search: PlanSearch, config: Config, parallel: ParallelConfig, slowest: Recompute) -> Config | None:
    """Return ``config`` in a layout with its fastest settings; None if the layout is refused or recomputes more."""
    parallel = replace(parallel, collective_timeout_s=config.parallel.collective_timeout_s)
    config = replace(config, parallel=parallel, critic=replace(config.critic, parallel=None))
    if not search.allows(config, "parallel."):
        return None
    replicas = parallel.num_ranks // ranks_of_replica(parallel)
    reason = layout_refusal(search.shape, parallel) or (FEW_SLOTS if replicas > config.batch.policy_minibatch_size else "")
    if reason:
        search.refuse(reason, config)
        return None
    return _settled(search, config, slowest)


def _settled(search: PlanSearch, config: Config, slowest: Recompute) -> Config | None:
    """Return the fitting configuration with the least recomputation, then the least offloading; None if none fits."""
    stays = Offload.auto if server_placement(config.rollout).shares_devices else Offload.never
    fastest = _with_long_pack(search, _with_settings(search, config, Recompute.none, stays))
    layout = (str(replace(config.parallel, num_ranks=0)), config.rollout.placement, config.rollout.tensor_parallel_size)
    fewer, known = search.settled.get(layout, (0, None))
    known = known if fewer <= config.parallel.num_ranks else None
    if known == _settings(fastest):  # with more ranks and the same layout each of them holds less
        return _shared(search, fastest)
    fits = min(slowest, known[0] if known else slowest, key=_RECOMPUTES.index)
    if known is None or known[0] is not fits:
        thriftiest = _with_settings(search, config, slowest, Offload.auto)
        if _misses(search, thriftiest) if slowest is Recompute.full else not _fitting(search, thriftiest):
            return None
    found = _fastest_that_fits(search, config, fits)
    if stays is Offload.never:  # what stays there would be lost to the caches of colocated servers
        found = _fitting(search, _with_settings(search, found, found.policy.recompute, Offload.never)) or found
    found = _fitting(search, _with_long_pack(search, found)) or found
    search.settled[layout] = config.parallel.num_ranks, _settings(found)
    return found


def _fastest_that_fits(search: PlanSearch, config: Config, fits: Recompute) -> Config:
    """Return the fastest fitting configuration with offloaded models, and at most the recomputation ``fits``, known to fit."""
    for recompute in _RECOMPUTES:
        rung = _with_settings(search, config, recompute, Offload.auto)
        if recompute is fits:
            return _shared(search, rung)
        if found := _fitting(search, rung):
            return found
    raise AssertionError(fits)


def _settings(config: Config) -> tuple[Recompute, Offload, int]:
    return config.policy.recompute, config.policy.offload, config.batch.max_tokens_per_microbatch


def _misses(search: PlanSearch, config: Config) -> bool:
    """True if ``config`` does not fit; the refusal is counted."""
    config = _shared(search, config)
    least = _least_bytes(search, config) - search.room
    if least > 0:
        search.refuse(TOO_MANY + UPDATE_POLICY, config, least)
        return True
    found = check_fit(config, search.facts, search.gpu)
    excess = found.needed - search.room
    lacks = (search.longest - found.kv_tokens) * kv_bytes(search.facts["policy"], config.rollout.tensor_parallel_size)
    if excess > 0:
        search.refuse(TOO_MANY + found.stage, config, excess)
    elif lacks > 0:
        search.refuse(NO_CACHE, config, lacks)
    return excess > 0 or lacks > 0


def _least_bytes(search: PlanSearch, config: Config) -> float:
    """Return an update's bytes without the batch's share, because the model alone rules out most layouts."""
    policy = models_of(config, search.facts)[0]
    states = parameter_bytes(policy.dtype, policy.settings.optimizer, policy.settings.vision)
    ranks = memory_by_rank(policy.facts, policy.parallel, PassSettings(0), num_ranks=config.parallel.num_ranks, states=states)
    return max(rank.total for rank in ranks)


def _with_long_pack(search: PlanSearch, config: Config) -> Config:
    """Use the given micro-batch size without a pipeline: fewer passes, and no bubble that grows with the size."""
    return config if config.parallel.pipeline_parallel_size > 1 else _with_pack(config, max(_packs(search)))


def _with_settings(search: PlanSearch, config: Config, recompute: Recompute, offload: Offload) -> Config:
    def pinned_or(value: Any, key: str) -> Any:
        return attrgetter(key)(search.config) if key in search.pinned else value

    def changed(name: str) -> Any:
        given = {"recompute": recompute, "offload": offload}
        return replace(getattr(config, name), **{key: pinned_or(value, f"{name}.{key}") for key, value in given.items()})

    critic = changed("critic") if needs_critic(config) else config.critic
    return _with_pack(replace(config, policy=changed("policy"), critic=critic), min(_packs(search)))


def _with_pack(config: Config, tokens: int) -> Config:
    return replace(config, batch=replace(config.batch, max_tokens_per_microbatch=tokens))


def _packs(search: PlanSearch) -> list[int]:
    """Return the micro-batch sizes (tokens) to try, decreasing: the given size, its half and so on."""
    own = search.config.batch.max_tokens_per_microbatch
    if _PACK in search.pinned:
        return [own]
    return [own, *(own >> halvings for halvings in range(1, 8) if own >> halvings >= _LEAST_PACK)]


def _fitting(search: PlanSearch, config: Config) -> Config | None:
    config = _shared(search, config)
    found = check_fit(config, search.facts, search.gpu)
    return None if found.problem or found.needed > search.room else config


def _shared(search: PlanSearch, config: Config) -> Config:
    """Return ``config`` with colocated servers that use the memory left by the trainer."""
    rollout = config.rollout
    if not server_placement(rollout).shares_devices or _FRACTION_KEYS & search.config.rollout.server_args.keys():
        return config
    fraction = largest_fraction(run_memory(config, models_of(config, search.facts)), search.gpu) or _LEAST_FRACTION
    return replace(config, rollout=replace(rollout, server_args={**rollout.server_args, _FRACTION_KEY: fraction}))
