"""Searches layouts of a trainer that fit a number of GPUs. Pure.

Memory is computed as in the dry run. Among fitting settings the fastest are kept: a layout recomputes and offloads no more than
necessary, and splits tensors and contexts no further than that requires. All other layouts are counted by the reason for refusal,
with the nearest miss.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from operator import attrgetter
from typing import Any, TypeVar

from megatron_rl.config.derived import needs_critic, shares_devices
from megatron_rl.config.layout import expert_tensor_size, ranks_of_replica
from megatron_rl.config.schema import Config, Offload, ParallelConfig, Recompute
from megatron_rl.desk.costs.gpus import Gpu
from megatron_rl.desk.costs.parameter_counts import (
    ParameterCount,
    embedding_parameters,
    head_parameters,
    layer_parameters,
)
from megatron_rl.desk.costs.rank_memory import PassSettings, RankMemory, memory_by_rank, parameter_bytes
from megatron_rl.desk.costs.run_memory import models_of, run_memory
from megatron_rl.desk.costs.serving_time import kv_bytes
from megatron_rl.desk.plan.layout_search import (
    LayoutFamily,
    ModelShape,
    context_sizes,
    cut_layers,
    divisors,
    expert_sizes,
    layout_refusal,
    layouts,
    shape_of,
    tensor_sizes,
)
from megatron_rl.desk.plan.memory_fit import SPARE_SHARE, check_fit, largest_fraction
from megatron_rl.families.family import ModelConfig
from megatron_rl.schedule.table import UPDATE_POLICY

LAYOUT_KEYS = tuple(
    f"parallel.{name}"
    for name in (
        *("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size", "virtual_pipeline_size"),
        *("expert_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "pipeline_layers"),
    )
)
CHOSEN = (
    *LAYOUT_KEYS,
    *("parallel.num_ranks", "policy.recompute", "policy.offload", "critic.recompute", "critic.offload"),
    *("rollout.placement", "rollout.tensor_parallel_size", "rollout.num_servers", "rollout.urls"),
    *("batch.window_tokens", "batch.max_tokens_per_microbatch"),
)
"""Keys that a plan chooses, except pinned ones."""
CRITIC_LAYOUT = "critic.parallel"
"""Section that a plan leaves empty, except if one of its keys is pinned: the critic has the policy's layout."""
_TP, _CP, _PP, _VPP, _EP, _ETP, _, _LAYERS = LAYOUT_KEYS
NUM_RANKS, SERVER_TP, NUM_SERVERS = "parallel.num_ranks", "rollout.tensor_parallel_size", "rollout.num_servers"
PLACEMENT, URLS = "rollout.placement", "rollout.urls"
_PACK = "batch.max_tokens_per_microbatch"
FRACTION_KEY = "mem-fraction-static"
FRACTION_KEYS = {FRACTION_KEY, FRACTION_KEY.replace("-", "_")}
_LEAST_FRACTION, _LEAST_PACK, _MOST_STAGES = 0.01, 8192, 16
_CHUNKS, _RECOMPUTES = (4, 2), list(Recompute)
TOO_MANY, FEW_SLOTS = "not enough memory in the stage ", "more replicas than responses of an update"
NO_CACHE = "a server's KV cache is too small for one response"
_Value = TypeVar("_Value")


@dataclass
class RefusedLayouts:
    """The number of layouts refused for one reason, and the nearest miss."""

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
    """Keys of ``CHOSEN`` and of ``CRITIC_LAYOUT`` that keep their values in ``config``."""
    wide: bool = False
    """True to look at every layout that the dry run accepts, and to fill a GPU's whole memory."""
    refused: dict[str, RefusedLayouts] = field(default_factory=dict)
    settled: dict[Any, tuple[int, tuple[Recompute, Offload, int]]] = field(default_factory=dict)
    """Maps a layout to its last number of ranks and the settings with which it fitted."""
    shape: ModelShape = field(init=False)
    held: ParameterCount = field(init=False)
    """The policy's trained parameters, without a head that is the embedding."""

    def __post_init__(self) -> None:
        facts = self.facts["policy"]
        self.shape = shape_of(facts)
        outer = [ParameterCount(split=embedding_parameters(facts).split)]
        outer += [] if facts.tie_word_embeddings else [head_parameters(facts)]
        self.held = ParameterCount.sum([*layer_parameters(facts), *outer])

    def choices(self, key: str, values: Sequence[_Value]) -> Sequence[_Value]:
        """Return the values of a key to try: ``values``, or the pinned value alone."""
        return (attrgetter(key)(self.config),) if key in self.pinned else values

    def allows(self, config: Config, section: str) -> bool:
        """True if ``config`` keeps the pinned values of the keys that start with ``section``, a section or a key."""
        keys = (key for key in self.pinned if key.startswith(section))
        return all(attrgetter(key)(config) == attrgetter(key)(self.config) for key in keys)

    def refuse(self, reason: str, config: Config, excess: float = math.inf) -> None:
        found = self.refused.setdefault(reason, RefusedLayouts())
        found.number += 1
        if found.nearest is None or excess < found.excess:
            found.nearest, found.excess = config, excess

    @property
    def pinned_layers(self) -> list[int]:
        """The pinned layers of each chunk, or an empty list."""
        return self.config.parallel.pipeline_layers if _LAYERS in self.pinned else []

    @property
    def spare(self) -> float:
        """Share of a GPU that a plan leaves free, because estimates are not exact."""
        return 0.0 if self.wide else SPARE_SHARE

    @property
    def room(self) -> float:
        """Bytes of a GPU that a plan may fill."""
        return (1 - self.spare) * self.gpu.hbm_bytes

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its response."""
        return self.config.batch.max_prompt_tokens + self.config.batch.max_response_tokens

    @property
    def rank_unit(self) -> int:
        """Number that divides the trainer ranks of every layout with the pinned sizes."""
        tp, cp, pp, ep, etp = (self.choices(key, (1,))[0] for key in (_TP, _CP, _PP, _EP, _ETP))
        return math.lcm(tp * cp * pp, pp * ep * (etp or tp))


def trainers(search: PlanSearch, config: Config) -> Iterator[Config]:
    """Yield copies of ``config`` with a trainer layout that fits; ``config`` has the number of ranks and the servers."""
    found = False
    per_machine, num_ranks = search.gpu.per_machine, config.parallel.num_ranks
    # Prefer splits within a node, because the estimates do not include the cost of the network between nodes.
    reaches = (num_ranks,) if search.wide else (per_machine, 8 * per_machine)
    for reach, stages in product(reaches, _stage_numbers(search, num_ranks)):
        if found and reach > reaches[0]:
            return
        whole = list(_of_kind(search, config, LayoutFamily(stages), reach))
        yield from whole
        found = found or bool(whole)
        if not whole and search.shape.experts:
            for shared in _of_kind(search, config, LayoutFamily(stages, whole=False), reach):
                found = True
                yield shared


def _stage_numbers(search: PlanSearch, num_ranks: int) -> Sequence[int]:
    """Return the numbers of pipeline stages to try, increasing."""
    usual = divisors(num_ranks, search.shape.layers if search.wide else _MOST_STAGES)
    if search.pinned_layers:
        usual = [max(len(search.pinned_layers) // search.choices(_VPP, (1,))[0], 1)]
    return search.choices(_PP, usual)


def _pairs(search: PlanSearch, num_ranks: int, stages: int, reach: int) -> list[tuple[int, int]]:
    """Return the pairs (tensor-parallel size, context-parallel size) over at most ``reach`` ranks, or those of pinned sizes."""
    every = divisors(num_ranks, num_ranks)
    tensors = search.choices(_TP, every if search.wide else tensor_sizes(num_ranks, search.gpu.per_machine))
    contexts = search.choices(_CP, every if search.wide else context_sizes(num_ranks))
    most = max(reach, search.choices(_TP, (1,))[0] * search.choices(_CP, (1,))[0])
    pairs = [pair for pair in product(tensors, contexts) if math.prod(pair) <= most]
    return [pair for pair in pairs if num_ranks % (math.prod(pair) * stages) == 0] or pairs


def _of_kind(search: PlanSearch, config: Config, kind: LayoutFamily, reach: int) -> Iterator[Config]:
    """Yield the fitting configurations of one layout family.

    A layout with more splitting is kept only if it recomputes less, because nothing else makes it faster.
    """
    num_ranks, stages = config.parallel.num_ranks, kind.stages
    own, slowest = search.config.parallel, Recompute.full
    pinned = {name: getattr(own, name) for key in LAYOUT_KEYS if key in search.pinned and (name := key.partition(".")[2])}
    cut = search.pinned_layers
    chunks = max(len(cut) // stages, 1) if cut else search.choices(_VPP, (1,))[0]
    pairs = _pairs(search, num_ranks, stages, reach)
    for experts in search.choices(_EP, expert_sizes(search.shape, num_ranks)):
        for parallel in layouts(search.shape, replace(kind, experts=experts, chunks=chunks, pinned=pinned), num_ranks, pairs):
            found = _placed(search, config, parallel, slowest)
            if found is None:
                continue
            yield found
            numbers = _CHUNKS if stages > 1 and not {_VPP, _LAYERS} & search.pinned else ()
            cuts = ((number, cut_layers(search.shape.layers, stages * number)) for number in numbers)
            more = (replace(parallel, virtual_pipeline_size=number, pipeline_layers=layers) for number, layers in cuts)
            # Of the interleaved layouts that fit, the one with the smallest bubble.
            yield from islice(filter(None, (_placed(search, config, interleaved, slowest) for interleaved in more)), 1)
            if found.policy.recompute is Recompute.none:
                return
            slowest = _RECOMPUTES[_RECOMPUTES.index(found.policy.recompute) - 1]


def _placed(search: PlanSearch, config: Config, parallel: ParallelConfig, slowest: Recompute) -> Config | None:
    """Return ``config`` with layout ``parallel`` and the fastest settings that fit, with at most the recomputation ``slowest``.

    Returns None if the layout is refused or nothing fits.
    """
    parallel = replace(parallel, collective_timeout_s=config.parallel.collective_timeout_s)
    own = config.critic.parallel if any(key.startswith(CRITIC_LAYOUT) for key in search.pinned) else None
    config = replace(config, parallel=parallel, critic=replace(config.critic, parallel=own))
    reason = layout_refusal(search.shape, parallel)
    if not reason and own and "critic" in search.facts:
        reason = layout_refusal(shape_of(search.facts["critic"]), replace(own, num_ranks=parallel.num_ranks))
    replicas = parallel.num_ranks // ranks_of_replica(parallel)
    if not reason and replicas > config.batch.policy_minibatch_size and not search.wide:
        reason = FEW_SLOTS
    if reason:
        search.refuse(reason, config)
        return None
    if _is_hopeless(search, config):
        return None
    found = _settled(search, config, slowest)
    if found or not search.wide or parallel.pipeline_parallel_size == 1 or _LAYERS in search.pinned:
        return found
    leveled = _leveled(search, config)
    return _settled(search, leveled, slowest) if leveled.parallel != parallel else None


def _is_hopeless(search: PlanSearch, config: Config) -> bool:
    """True if even equal shares of weights and state exceed a GPU by more than the best refused layout; counts the refusal."""
    held, parallel, policy = search.held, config.parallel, config.policy
    state = parameter_bytes(policy.dtype, policy.optimizer, policy.vision, policy.lora).least
    dense = held.split / parallel.tensor_parallel_size + held.replicated
    experts = held.experts / (parallel.expert_parallel_size * expert_tensor_size(parallel))
    mean = (state.weight + state.gradient) * (dense + experts) / parallel.pipeline_parallel_size
    excess = mean + state.optimizer * held.number / parallel.num_ranks - search.room
    reason = TOO_MANY + UPDATE_POLICY
    if excess <= 0 or reason not in search.refused or excess < search.refused[reason].excess:
        return False
    search.refuse(reason, config, excess)
    return True


def _leveled(search: PlanSearch, config: Config) -> Config:
    """Return ``config`` with layers moved from the fullest pipeline stages to the emptiest, as long as the fullest needs less."""
    config = _with_settings(search, config, Recompute.full, Offload.auto)
    chunks = config.parallel.pipeline_parallel_size * config.parallel.virtual_pipeline_size
    layers, stages = search.shape.layers, config.parallel.pipeline_parallel_size
    best = [layers * (chunk + 1) // chunks - layers * chunk // chunks for chunk in range(chunks)]
    best = config.parallel.pipeline_layers or best
    sizes = _stage_bytes(search, config)
    for _ in range(layers):
        order = sorted(range(chunks), key=lambda chunk: sizes[chunk % stages])
        fullest = next((chunk for chunk in reversed(order) if best[chunk] > 1), order[0])
        moved = [number - (chunk == fullest) + (chunk == order[0]) for chunk, number in enumerate(best)]
        tried = replace(config, parallel=replace(config.parallel, pipeline_layers=moved))
        if fullest == order[0] or layout_refusal(search.shape, tried.parallel) or max(new := _stage_bytes(search, tried)) >= max(sizes):
            break
        best, sizes, config = moved, new, tried
    return config


def _stage_bytes(search: PlanSearch, config: Config) -> list[float]:
    """Return the policy's bytes in an update, by pipeline stage."""
    return [rank.total for rank in _policy_ranks(search, config, search.longest)]


def _settled(search: PlanSearch, config: Config, slowest: Recompute) -> Config | None:
    """Return the fitting configuration with the least recomputation (at most ``slowest``), then the least offloading; None if none fits."""
    stays = Offload.auto if shares_devices(config.rollout) else Offload.never
    fastest = _with_long_pack(search, _with_settings(search, config, Recompute.none, stays))
    layout = (str(replace(config.parallel, num_ranks=0)), config.rollout.placement, config.rollout.tensor_parallel_size)
    fewer, known = search.settled.get(layout, (0, None))
    known = known if fewer <= config.parallel.num_ranks else None
    if known == _settings(fastest):  # with more ranks in the same layout, each rank needs less
        return _shared(search, fastest)
    fits = min(slowest, known[0] if known else slowest, key=_RECOMPUTES.index)
    if known is None or known[0] is not fits:
        thriftiest = _with_settings(search, config, slowest, Offload.auto)
        if _misses(search, thriftiest) if slowest is Recompute.full else not fitting(search, thriftiest):
            return None
    found = _fastest_that_fits(search, config, fits)
    if stays is Offload.never:  # on shared devices, models that stay would take memory from the servers' caches
        found = fitting(search, _with_settings(search, found, found.policy.recompute, Offload.never)) or found
    found = fitting(search, _with_long_pack(search, found)) or found
    search.settled[layout] = config.parallel.num_ranks, _settings(found)
    return found


def _fastest_that_fits(search: PlanSearch, config: Config, fits: Recompute) -> Config:
    """Return ``config`` with offloaded models and the least recomputation that fits: at most ``fits``, which is known to fit."""
    for recompute in _RECOMPUTES:
        rung = _with_settings(search, config, recompute, Offload.auto)
        if recompute is fits:
            return _shared(search, rung)
        if found := fitting(search, rung):
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
    return max(rank.total for rank in _policy_ranks(search, config, 0))


def _policy_ranks(search: PlanSearch, config: Config, num_tokens: int) -> list[RankMemory]:
    """Return the policy's memory in an update with micro-batches of ``num_tokens`` tokens, by pipeline rank."""
    policy = models_of(config, search.facts)[0]
    states = parameter_bytes(policy.dtype, policy.settings.optimizer, policy.settings.vision, policy.settings.lora)
    passes = PassSettings(num_tokens, recompute=policy.settings.recompute, number_bytes=policy.number_bytes)
    return memory_by_rank(policy.facts, policy.parallel, passes, num_ranks=config.parallel.num_ranks, states=states)


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
    smaller = [own >> halvings for halvings in range(1, 8) if own >> halvings >= _LEAST_PACK]
    return [own, *smaller, *([min(own, search.longest)] if search.wide else [])]


def fitting(search: PlanSearch, config: Config) -> Config | None:
    config = _shared(search, config)
    found = check_fit(config, search.facts, search.gpu)
    return None if found.problem or found.needed > search.room else config


def _shared(search: PlanSearch, config: Config) -> Config:
    """Return ``config`` with colocated servers that use the memory left by the trainer."""
    rollout = config.rollout
    if not shares_devices(rollout) or FRACTION_KEYS & search.config.rollout.server_args.keys():
        return config
    memory, smallest = run_memory(config, models_of(config, search.facts)), {"smallest": _LEAST_FRACTION} if search.wide else {}
    fraction = largest_fraction(memory, search.gpu, spare=search.spare, **smallest) or _LEAST_FRACTION
    return replace(config, rollout=replace(rollout, server_args={**rollout.server_args, FRACTION_KEY: fraction}))
