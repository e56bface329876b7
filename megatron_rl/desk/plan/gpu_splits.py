"""Divides a number of GPUs between trainer and servers: the splits for which both fit. Pure.

Servers share the trainer's GPUs or have separate nodes. If nothing fits, a wide search looks at every layout that the dry run
accepts, with no memory kept free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_rl.config.derived import needs_critic
from megatron_rl.config.schedule_facts import Overlap, facts_of, overlap_of
from megatron_rl.config.schema import Config, Dtype, Mode, Moments, Placement
from megatron_rl.desk.costs.gpus import larger_gpus
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.rank_memory import parameter_bytes
from megatron_rl.desk.costs.run_memory import memory_fraction, models_of
from megatron_rl.desk.costs.serving_time import kv_bytes
from megatron_rl.desk.plan.layout_search import divisors
from megatron_rl.desk.plan.memory_fit import LARGEST_FRACTION, Changes, changed
from megatron_rl.desk.plan.plan_search import (
    FRACTION_KEY,
    FRACTION_KEYS,
    NO_CACHE,
    NUM_RANKS,
    NUM_SERVERS,
    PLACEMENT,
    SERVER_TP,
    URLS,
    PlanSearch,
    fitting,
    trainers,
)
from megatron_rl.families.sglang_limits import split_problems

_SERVER_FRACTION = 0.8
"""Memory fraction of servers on separate GPUs: the process groups for weights allocate memory after the cache is sized."""
_MOST_SHARES, _FEW_MACHINES, _FINER = 8, 16, 4
MOST_MACHINES = 8
"""Largest number of nodes that one server may span."""
GpuSplit = tuple[tuple[Config, ...], tuple[Config, ...]]
"""The trainers and the servers that fit their parts of the GPUs. No servers if those share the trainer's GPUs and are part of the
trainers' configurations."""


def splits(search: PlanSearch, num_gpus: int) -> Iterator[GpuSplit]:
    """Yield all fitting splits, colocated servers first. Raises ConfigError for an invalid mem-fraction-static."""
    found = False
    for split in _splits(search, num_gpus):
        found = True
        yield split
    if not found and not search.wide:
        search.refused.clear()
        yield from _splits(replace(search, wide=True, settled={}), num_gpus)


def splits_near(search: PlanSearch, num_gpus: int, best: Config) -> Iterator[GpuSplit]:
    """Yield the fitting splits between that of ``best`` and the next ones that ``splits`` tried; none if it tried all.

    Only where servers and trainer work at the same time do their shares have to be even; other schedules gain at most 1 %.
    """
    machines, own = num_gpus // search.gpu.per_machine, -(-best.parallel.num_ranks // search.gpu.per_machine)
    tried = _usual_nodes(machines)
    if not facts_of(search.config).ahead or NUM_RANKS in search.pinned or own not in tried or len(tried) == machines - 1:
        return
    first, last = (tried[min(max(tried.index(own) + step, 0), len(tried) - 1)] for step in (-1, 1))
    between = range(first, last + 1, max(machines // _MOST_SHARES // _FINER, 1))
    yield from _separate(search, _shares_of(search, num_gpus, [number for number in between if number not in tried]))


def _splits(search: PlanSearch, num_gpus: int) -> Iterator[GpuSplit]:
    if shared := tuple(_colocated(search, num_gpus)):
        yield shared, ()
    yield from _separate(search, _shares(search, num_gpus))


def _separate(search: PlanSearch, shares: Sequence[tuple[int, int]]) -> Iterator[GpuSplit]:
    for num_ranks, num_others in shares:
        servers = tuple(_servers(search, num_ranks, num_others))
        fitting_trainers = tuple(trainers(search, servers[0])) if servers else ()
        if fitting_trainers:
            yield fitting_trainers, servers


def fewest_gpus(search: PlanSearch, most: int = 4096) -> int:
    """Return the fewest GPUs that some layout fits, in whole nodes beyond one node; 0 if ``most`` are not enough."""
    counting, per_machine = replace(search, wide=True, refused={}, settled={}), search.gpu.per_machine
    policy = models_of(search.config, search.facts)[0]
    settings = policy.settings
    states = sum(parameter_bytes(policy.dtype, settings.optimizer, settings.vision, settings.lora).least[:3])
    least = states * num_parameters(policy.facts) / search.gpu.hbm_bytes
    if policy.number_bytes * num_parameters(policy.facts) > search.gpu.hbm_bytes * per_machine * MOST_MACHINES:
        return 0
    last = 0
    for number in (*range(1, per_machine), *_machines(per_machine, most)):
        if number >= least and anything_fits(counting, number):
            between = range(max(last + per_machine, per_machine), number, per_machine)
            return next((few for few in between if few >= least and anything_fits(counting, few)), number)
        last = number
    return 0


def ways_out(search: PlanSearch, num_gpus: int) -> Iterator[str]:
    """Yield the changes with which a layout fits ``num_gpus``; each one was tried alone."""
    wide = replace(search, wide=True, refused={}, settled={})
    for key in sorted(search.pinned):
        if anything_fits(replace(wide, pinned=search.pinned - {key}, refused={}, settled={}), num_gpus):
            yield f"{key} not given"
    for changes in _changes(search.config):
        if anything_fits(replace(wide, config=changed(search.config, changes), refused={}, settled={}), num_gpus):
            yield " ".join(f"{key}={getattr(value, 'value', value)}" for key, value in changes.items())
    for name, larger in larger_gpus(search.gpu):
        if anything_fits(replace(wide, gpu=larger, refused={}, settled={}), num_gpus):
            yield f"--gpu {name}"


def _changes(config: Config) -> Iterator[Changes]:
    """Changes of keys that a plan does not choose, of which each needs less memory."""
    models = ("policy", "critic") if needs_critic(config) else ("policy",)
    if config.policy.dtype is Dtype.bfloat16 and config.policy.optimizer.moments is not Moments.bfloat16:
        yield {f"{name}.optimizer.moments": Moments.bfloat16 for name in models}
    if overlap_of(config.schedule) >= Overlap.training:
        yield {"schedule.mode": Mode.tppo}
    yield from ({"batch.max_response_tokens": config.batch.max_response_tokens // parts} for parts in (2, 4))


def not_looked_at(search: PlanSearch, other_modes: Sequence[str] | None = None) -> list[str]:
    """Return the schedules and placements that were left out. ``other_modes``: those left out; None for all but the recipe's."""
    own = search.config.schedule.mode
    modes = [mode.value for mode in Mode if mode is not own] if other_modes is None else other_modes
    missing = [f"schedule.mode={' or '.join(modes)}"] if modes else []
    if PLACEMENT in search.pinned:
        missing += [f"rollout.placement={one.value}" for one in Placement if one is not search.config.rollout.placement]
    return missing


def _machines(per_machine: int, most: int) -> Iterator[int]:
    """Yield numbers of GPUs up to ``most``, in whole nodes; from 32 nodes on in steps of about a sixteenth of the number."""
    number = per_machine
    while number <= most:
        yield number
        number += per_machine * max(1, number // (16 * per_machine))


def anything_fits(search: PlanSearch, num_gpus: int) -> bool:
    """Return whether ``splits`` would yield anything."""
    if next(_colocated(search, num_gpus), None):
        return True
    for num_ranks, num_others in reversed(_shares(search, num_gpus)):
        servers = next(_servers(search, num_ranks, num_others), None)
        if servers and next(trainers(search, servers), None):
            return True
    return False


def _shares(search: PlanSearch, num_gpus: int) -> list[tuple[int, int]]:
    """Return the pairs (trainer ranks, GPUs of servers) to try.

    Within one node every number; on several nodes whole nodes: those of ``_usual_nodes``, or in a wide search all.
    """
    per_machine = search.gpu.per_machine
    machines = num_gpus // per_machine
    if NUM_RANKS in search.pinned:
        number = search.config.parallel.num_ranks
        used = number if num_gpus <= per_machine else -(-number // per_machine) * per_machine
        return [(number, others)] if (others := max(num_gpus - used, 0) or num_gpus - number) > 0 else []
    if num_gpus <= per_machine:
        return [(number, num_gpus - number) for number in range(search.rank_unit, num_gpus, search.rank_unit)]
    return _shares_of(search, num_gpus, range(1, machines) if search.wide else _usual_nodes(machines))


def _usual_nodes(machines: int) -> list[int]:
    """Return the trainer's numbers of nodes to try first: all, or of many seven at equal distances."""
    if machines <= _FEW_MACHINES:
        return list(range(1, machines))
    return sorted({round(machines * part / _MOST_SHARES) for part in range(1, _MOST_SHARES)})


def _shares_of(search: PlanSearch, num_gpus: int, nodes: Sequence[int]) -> list[tuple[int, int]]:
    per_machine = search.gpu.per_machine
    shares = [(_ranks_on(search, number), num_gpus // per_machine * per_machine - per_machine * number) for number in nodes]
    return [share for share in shares if share[0]]


def _ranks_on(search: PlanSearch, num_nodes: int) -> int:
    """Return the trainer ranks on whole nodes: all GPUs, or as many of each node as the pinned sizes divide; 0 if they divide none."""
    numbers = (num_nodes * each for each in range(search.gpu.per_machine, 0, -1))
    return next((number for number in numbers if number % search.rank_unit == 0), 0)


def _colocated(search: PlanSearch, num_gpus: int) -> Iterator[Config]:
    """Yield fitting configurations with colocated servers; none if the schedule generates while the trainer trains."""
    if overlap_of(search.config.schedule) >= Overlap.training:
        return
    whole = num_gpus - num_gpus % search.rank_unit
    num_ranks = whole if num_gpus <= search.gpu.per_machine else _ranks_on(search, num_gpus // search.gpu.per_machine)
    num_ranks = search.choices(NUM_RANKS, (num_ranks,))[0]
    if not 0 < num_ranks <= num_gpus:
        return
    sizes = [size for size in _server_sizes(search, num_ranks) if num_ranks % size == 0]
    ways = [_served(search, Placement.colocated, num_ranks, size, num_ranks // size) for size in reversed(sizes)]
    ways = [way for way in ways if search.allows(way, "rollout.") and _holds_a_response(search, way, LARGEST_FRACTION)]
    # The largest servers need least per GPU: a trainer that does not fit with them fits with no others.
    for trainer in trainers(search, ways[0]) if ways else ():
        yield trainer
        others = (replace(trainer, rollout=way.rollout) for way in ways[1:])
        yield from (fits for other in others if (fits := fitting(search, other)))


def _servers(search: PlanSearch, num_ranks: int, num_gpus: int) -> Iterator[Config]:
    """Yield servers on ``num_gpus`` separate GPUs with KV cache for a response, spanning several nodes if one is too small."""
    found, per_machine = False, search.gpu.per_machine
    for size in (*_server_sizes(search, num_gpus), *_server_sizes(search, num_gpus, machines=True)):
        if found and size > per_machine:
            return
        # Servers within a node leave its remaining GPUs idle.
        in_nodes = num_gpus // per_machine * (per_machine // size) if size <= per_machine <= num_gpus else num_gpus // size
        number = search.choices(NUM_SERVERS, (in_nodes,))[0]
        config = _served(search, Placement.disaggregated, num_ranks, size, number)
        fits = 0 < number * size <= num_gpus and search.allows(config, "rollout.")
        if fits and _holds_a_response(search, config, memory_fraction(config)):
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
    if machines:
        powers = range(1, MOST_MACHINES.bit_length())
        usual = [size for power in powers if num_gpus % (size := 2**power * per_machine) == 0]
        sizes: Sequence[int] = [] if SERVER_TP in search.pinned else usual
    else:
        sizes = search.choices(SERVER_TP, divisors(num_gpus if num_gpus % per_machine else per_machine, per_machine))
    yield from (size for size in sizes if num_gpus and not any(split_problems(model, size, "")))


def _served(search: PlanSearch, placement: Placement, num_ranks: int, size: int, number: int) -> Config:
    rollout = search.config.rollout
    arguments = dict(rollout.server_args)
    if placement is Placement.disaggregated and not FRACTION_KEYS & arguments.keys():
        arguments[FRACTION_KEY] = LARGEST_FRACTION if search.wide else _SERVER_FRACTION
    urls = rollout.urls if URLS in search.pinned else []
    rollout = replace(
        rollout, placement=placement, urls=urls, tensor_parallel_size=size, num_servers=number, server_args=arguments
    )
    return replace(search.config, rollout=rollout, parallel=replace(search.config.parallel, num_ranks=num_ranks))
