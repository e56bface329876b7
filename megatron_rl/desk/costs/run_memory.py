"""Memory that a run needs on a GPU, stage by stage, and on a node's host. Pure.

Each stage is represented by its fullest trainer rank. Weights, gradients and optimizer state are exact
(``rank_memory``). Activations, logits and batches assume the longest sequences that the configuration allows;
figures for libraries are rounded (constants below). An inactive model is offloaded to host memory if
``policy.offload`` or ``critic.offload`` says so. Gradients exist only during an update.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.derived import (
    bucket_bytes,
    critic_dtype,
    critic_shares_base,
    needs_critic,
    num_responses_per_step,
    num_rollout_workers,
    reference_folders,
    shares_devices,
)
from megatron_rl.config.layout import critic_layout, expert_tensor_size, ranks_of_replica
from megatron_rl.config.schema import (
    Config,
    CriticConfig,
    Dtype,
    Fp8,
    Offload,
    ParallelConfig,
    PolicyConfig,
    RoutingReplay,
)
from megatron_rl.desk.costs.parameter_counts import ParameterCount, layer_parameters, num_parameters
from megatron_rl.desk.costs.rank_memory import (
    PassSettings,
    RankMemory,
    chunked_logits_bytes,
    memory_by_rank,
    packs_in_progress,
    parameter_bytes,
)
from megatron_rl.errors import ConfigError
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.model_facts import dims, has_experts, num_experts, text_config
from megatron_rl.schedule.table import GENERATE, ROWS, DeviceWork, row_of

CONTEXT_BYTES = 2.0e9
"""The CUDA context, libraries' workspaces and memory lost to the allocator. slime v0.1.0 reports 3 to 5 GB after models and
NCCL groups were freed, which includes the allocator's cache."""
GROUP_BYTES = 0.6e9
"""NCCL's buffers for one group. slime v0.1.0 reports 12 GB for all groups of a large mixture, which has about twenty."""
SERVER_CONTEXT_BYTES, SERVER_GRAPH_BYTES = 1.5e9, 2.0e9
"""Server memory outside mem-fraction-static: the part that stays while it sleeps; CUDA graphs and activations while awake."""
MEMORY_FRACTION = 0.85
"""SGLang's mem-fraction-static if no server option sets it."""
GPUS_PER_MACHINE = 8

KV_CACHE = "server: KV cache"
STATES = ("weights", "gradients", "optimizer")
COMPONENTS = (
    "activations",
    "logits",
    "batch",
    "routes",
    "8-bit copies of weights",
    "weights in transit",
    "server: weights",
    KV_CACHE,
    "server: CUDA",
    "NCCL",
    "CUDA and PyTorch",
)

_ORDER = (DeviceWork.forward, DeviceWork.update, DeviceWork.send, DeviceWork.none)
"""The order of the stages in tables, by their work."""
_UPDATE_BYTES, _PASS_BYTES, _OUTPUT_BYTES = 24, 12, 4
"""Device bytes per token of a micro-batch in an update and in a pass (ids in int64, mask, float32 fields), and of a pass's output."""
_RESPONSE_BYTES, _BATCH_BYTES = 16, 50
"""Driver bytes per token: responses as arrays (12.1 measured, ``tools/bench_driver.py``); columns with the copies that ranks read."""
_HELD_BYTES = 24
"""Bytes per token of a step's sequences on each rank that caches them: ids in int32, masks, and float32 fields."""
_MOST_IN_A_BYTE = 255
"""Largest number of experts whose ids, plus one, fit into a byte."""
_PROCESS_BYTES = 4.0e9
"""Host memory of a rank process with PyTorch and CUDA loaded."""


@dataclass(frozen=True)
class RunModel:
    """A model of the run on the trainer ranks."""

    name: str
    facts: ModelConfig
    parallel: ParallelConfig
    settings: PolicyConfig | CriticConfig
    dtype: Dtype
    trains: bool

    @property
    def is_critic(self) -> bool:
        return isinstance(self.settings, CriticConfig)

    @property
    def number_bytes(self) -> int:
        """Bytes of a weight or an activation value."""
        return 4 if self.dtype is Dtype.float32 else 2

    @property
    def offloads(self) -> bool:
        """True if this model is offloaded while inactive, which happens on GPUs only."""
        return self.settings.offload is not Offload.never


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage on the trainer rank that needs most."""

    name: str
    """The stage's name in the stage table."""
    rank: int
    """The trainer rank that needs most memory in this stage."""
    parts: Mapping[str, float]
    """Bytes by component: names in ``COMPONENTS``, and ``model: state`` for each of ``STATES``."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class RunMemory:
    """Memory of a run: GPU memory by stage, and host memory of the driver's node."""

    stages: tuple[StageMemory, ...]
    """Memory of each stage; colocated servers are counted without their KV cache."""
    server_weights: float
    """Bytes of weights on each GPU of a server."""
    host: Mapping[str, float]
    """Bytes by component on the driver's node."""


def model_folders(config: Config) -> dict[str, str]:
    """Checkpoint folder of each model that ``train`` builds (``training/trainer_ranks.py``), keyed by the model's name there."""
    folders = {"policy": config.policy.path}
    folders |= {"critic": config.critic.path or config.policy.path} if needs_critic(config) else {}
    return folders | reference_folders(config) | ({"process": config.reward.process.path} if config.reward.process.path else {})


def models_of(config: Config, facts: Mapping[str, ModelConfig]) -> list[RunModel]:
    """The run's models. ``facts``: contents of config.json for each of ``model_folders``."""

    def model(name: str) -> RunModel:
        trains = name in ("policy", "critic")
        if name in ("critic", "process"):
            return RunModel(name, facts[name], critic_layout(config), config.critic, critic_dtype(config), trains)
        return RunModel(name, facts[name], config.parallel, config.policy, config.policy.dtype, trains)

    return [model(name) for name in model_folders(config)]


def memory_fraction(config: Config) -> float:
    """SGLang's mem-fraction-static of the run's servers. Raises ConfigError if it is not in (0, 1]."""
    fraction = _server_options(config).get("mem-fraction-static", MEMORY_FRACTION)
    try:
        share = float(fraction)
    except (TypeError, ValueError):
        share = math.nan
    if isinstance(fraction, bool) or not 0 < share <= 1:
        raise ConfigError(f"rollout.server_args.mem-fraction-static: expected a number above 0 and up to 1, got {fraction!r}")
    return share


def server_memory(config: Config, memory: RunMemory, hbm_bytes: float) -> dict[str, float]:
    """Bytes by component that an awake server takes on a GPU with ``hbm_bytes``; the cache fills the share that it is granted."""
    cache = max(0.0, memory_fraction(config) * hbm_bytes - memory.server_weights)
    return {"server: weights": memory.server_weights, KV_CACHE: cache, "server: CUDA": SERVER_CONTEXT_BYTES + SERVER_GRAPH_BYTES}


def with_kv_cache(config: Config, memory: RunMemory, hbm_bytes: float) -> RunMemory:
    """Return ``memory`` on GPUs with ``hbm_bytes``, where colocated servers fill the share that they are granted."""
    cache = {KV_CACHE: server_memory(config, memory, hbm_bytes)[KV_CACHE]}
    stages = [replace(one, parts={**one.parts, **cache}) if one.name == GENERATE else one for one in memory.stages]
    return replace(memory, stages=tuple(stages))


def _server_options(config: Config) -> dict[str, Any]:
    return {name.lstrip("-").replace("_", "-"): value for name, value in config.rollout.server_args.items()}


def run_memory(config: Config, models: list[RunModel]) -> RunMemory:
    """Memory of a whole run. ``models``: from ``models_of``; their layouts fit ``parallel.num_ranks``, which must be resolved."""
    run = _Run(config, models)
    return RunMemory(tuple(_fullest(run, name) for name in run.stage_names), run.server_weights, run.host())


def _fullest(run: "_Run", stage: str) -> StageMemory:
    # Ranks differ only by pipeline stage, but models may be split at different ranks: check each first rank of a stage.
    starts = sorted({start for model in run.models for start in run.stage_starts(model)})
    stages = (StageMemory(stage, rank, dict(run.parts(stage, rank))) for rank in starts)
    return max(stages, key=lambda memory: memory.total)


class _Run:
    def __init__(self, config: Config, models: list[RunModel]) -> None:
        self.config, self.models, self.num_ranks = config, models, config.parallel.num_ranks
        self.is_colocated = shares_devices(config.rollout)
        policy = models[0]
        # Servers quantize only the layers' matrices.
        is_8_bit = "8" in str(_server_options(config).get("quantization", ""))
        saved = (policy.number_bytes - 1) * _in_layers(policy) if is_8_bit else 0
        weights = policy.number_bytes * num_parameters(policy.facts) - saved
        self.server_weights = weights / config.rollout.tensor_parallel_size
        self._group_bytes = GROUP_BYTES * self._num_groups()
        self._packs = {(model.name, updates): self._make_packs(model, updates) for model in models for updates in (True, False)}
        self._memory_of = {(model.name, updates): self._by_rank(model, updates) for model in models for updates in (True, False)}

    @property
    def stage_names(self) -> list[str]:
        """Stages with a model on the devices, or colocated servers awake."""
        models = [model.name for model in self.models]
        found = []
        for row in ROWS:
            if row.model == "critic" and row.work is DeviceWork.forward:
                continue  # never more than its update, on the same ranks
            active = self._active(row.model)
            if active or (row.servers_awake and self.is_colocated):
                found.append((_ORDER.index(row.work), [*models, ""].index(active.name if active else ""), row.name))
        return [name for *_, name in sorted(found)]

    def stage_starts(self, model: RunModel) -> range:
        return range(0, self.num_ranks, self.num_ranks // model.parallel.pipeline_parallel_size)

    def parts(self, stage: str, rank: int) -> Iterator[tuple[str, float]]:
        """(component, bytes) of a rank's GPU."""
        row = row_of(stage)
        updates, passes = row.work is DeviceWork.update, row.work in (DeviceWork.forward, DeviceWork.update)
        for model in self.models:
            is_active, memory = model is self._active(row.model), self._memory(model, rank, updates)
            is_base = model.name == "policy" and row.model == "critic" and critic_shares_base(self.config)
            if is_active or is_base or not self._waits(model):
                yield f"{model.name}: weights", memory.weights
            if is_active and updates:
                yield f"{model.name}: gradients", memory.gradients
            if not self._waits(model) or (is_active and self._has_state(model, row.work)):
                yield f"{model.name}: optimizer", memory.optimizer
            if isinstance(model.settings, PolicyConfig) and model.settings.fp8 is not Fp8.none:
                # Transformer Engine keeps these for forward and, in training, backward products; they are never offloaded.
                share = _in_layers(model) / num_parameters(model.facts)
                yield "8-bit copies of weights", (2 if model.trains else 1) * share * memory.weights / model.number_bytes
            if is_active and passes:
                yield from self._work(model, rank, updates)
        if row.work is DeviceWork.send:
            yield "weights in transit", self._sending()
        yield "NCCL", self._group_bytes
        yield "CUDA and PyTorch", CONTEXT_BYTES
        if self.is_colocated:
            yield "server: weights", self.server_weights if row.servers_awake else 0.0
            yield "server: CUDA", SERVER_CONTEXT_BYTES + (SERVER_GRAPH_BYTES if row.servers_awake else 0.0)

    def _active(self, name: str) -> RunModel | None:
        """Return the model of this name on the devices. References by prompt type take turns, so the largest of them counts."""
        named = [model for model in self.models if model.name.partition(".")[0] == name]
        return max(named, key=lambda model: num_parameters(model.facts), default=None)

    def host(self) -> dict[str, float]:
        """Bytes by component on the driver's node."""
        tokens = num_responses_per_step(self.config) * self._longest
        ranks_here = min(self.num_ranks, GPUS_PER_MACHINE)
        waiting = sum(
            max(memory.weights + memory.optimizer for memory in self._memory_of[model.name, False])
            for model in self.models
            if self._waits(model)
        )
        policy = self.models[0]
        # Ranks of one replica cache the same sequences, separately for each layout.
        held = {
            ranks_of_replica(model.parallel): self._sequences(model, updates=False) * self._longest
            for model in self.models
        }
        routes = self._route_bytes(policy)
        is_served = self.config.policy.moe.routing_replay is RoutingReplay.R3
        num_machines = math.ceil(self.num_ranks / GPUS_PER_MACHINE)
        # Rollout workers run on each node, for its share of the servers; ranks map arrays that are all on their own node.
        num_stores = num_machines if num_rollout_workers(self.config, 1, 1) else 1
        holds_routes = not is_served or num_machines > 1
        components = {
            "driver: responses of a step": _RESPONSE_BYTES * tokens,
            "driver: batches": _BATCH_BYTES * tokens,
            "driver: routes": is_served * routes * tokens / num_stores,
            f"cached sequences, {ranks_here} ranks": ranks_here * _HELD_BYTES * sum(held.values()),
            f"cached routes, {ranks_here} ranks": holds_routes * ranks_here * routes * held[ranks_of_replica(policy.parallel)],
            f"idle models, {ranks_here} ranks": waiting * ranks_here,
            f"processes, {ranks_here} ranks": _PROCESS_BYTES * ranks_here,
        }
        return {name: size for name, size in components.items() if size}

    def _waits(self, model: RunModel) -> bool:
        """True if the model is offloaded while inactive: offloading is on, and another model or a server needs the device."""
        return model.offloads and (len(self.models) > 1 or self.is_colocated)

    def _has_state(self, model: RunModel, work: DeviceWork) -> bool:
        """True if a model that is offloaded while inactive (``_waits``) has its optimizer state on the device during ``work``."""
        if work is DeviceWork.forward:
            # It left after its last update where another model trained or servers woke; a pass brings back weights alone.
            return not self.is_colocated and not any(other.trains and other is not model for other in self.models)
        return not (work is DeviceWork.send and self.is_colocated)

    @property
    def _longest(self) -> int:
        return self.config.batch.max_prompt_tokens + self.config.batch.max_response_tokens

    def _by_rank(self, model: RunModel, updates: bool) -> list[RankMemory]:
        tokens, num_packs = self._packs[model.name, updates]
        passes = PassSettings(
            tokens,
            num_packs=num_packs,
            recompute=model.settings.recompute,
            number_bytes=model.number_bytes,
            forward_only=not updates,
        )
        settings = model.settings
        states = parameter_bytes(model.dtype, settings.optimizer if model.trains else None, settings.vision, settings.lora)
        states = states._replace(shares=model.name == "critic" and critic_shares_base(self.config))
        return memory_by_rank(
            model.facts, model.parallel, passes, num_ranks=self.num_ranks, is_critic=model.is_critic, states=states
        )

    def _memory(self, model: RunModel, rank: int, updates: bool) -> RankMemory:
        return self._memory_of[model.name, updates][self._pipeline_rank(model, rank)]

    def _pipeline_rank(self, model: RunModel, rank: int) -> int:
        return rank // (self.num_ranks // model.parallel.pipeline_parallel_size)

    def _sequences(self, model: RunModel, updates: bool) -> int:
        """Sequences per replica of one update, or of the whole batch."""
        batch, total = self.config.batch, num_responses_per_step(self.config)
        if updates:
            total = min(total, batch.critic_minibatch_size if model.is_critic else batch.policy_minibatch_size)
        return math.ceil(total / (self.num_ranks // ranks_of_replica(model.parallel)))

    def _make_packs(self, model: RunModel, updates: bool) -> tuple[int, int]:
        """Returns (tokens per micro-batch, micro-batches per pass)."""
        tokens = self._sequences(model, updates) * self._longest
        pack = max(self._longest, min(self.config.batch.max_tokens_per_microbatch, tokens))
        return pack, math.ceil(tokens / pack)

    def _work(self, model: RunModel, rank: int, updates: bool) -> Iterator[tuple[str, float]]:
        yield "activations", self._memory(model, rank, updates).activations
        pack, num_packs = self._packs[model.name, updates]
        stage = self._pipeline_rank(model, rank)
        is_last = stage == model.parallel.pipeline_parallel_size - 1
        if is_last and not model.is_critic:
            yield "logits", chunked_logits_bytes(
                model.facts, model.parallel, tokens=pack, number_bytes=model.number_bytes, updates=updates
            )
        # A micro-batch is on the device from its start until its backward pass ends.
        tokens = pack * (packs_in_progress(model.parallel, stage, num_packs) if updates else 1)
        answered = 0 if updates or not is_last else num_packs * pack * _OUTPUT_BYTES
        yield "batch", tokens * (_UPDATE_BYTES if updates else _PASS_BYTES) + answered
        if not updates and self._records(model) and model.parallel.virtual_pipeline_size > 1:
            tokens = num_packs * pack  # routes that one chunk recorded stay until the other chunks have finished
        yield "routes", tokens * self._route_bytes(model, recorded=not updates and self._records(model))

    def _records(self, model: RunModel) -> bool:
        return isinstance(model.settings, PolicyConfig) and model.settings.moe.routing_replay is RoutingReplay.R2

    def _route_bytes(self, model: RunModel, *, recorded: bool = False) -> int:
        """Bytes per token of the expert ids that are replayed: one byte or int16 per id; int16 in a pass that records them.

        0 if nothing is replayed, as in a reference.
        """
        replays = isinstance(model.settings, PolicyConfig) and model.settings.moe.routing_replay is not RoutingReplay.none
        if not replays or model.name.startswith("reference") or not any(has_experts(model.facts)):
            return 0
        text = text_config(model.facts)
        in_a_byte = not recorded and num_experts(model.facts) <= _MOST_IN_A_BYTE
        return (1 if in_a_byte else 2) * text.num_hidden_layers * text.num_experts_per_tok

    def _sending(self) -> float:
        """Bytes of a publish on a sending rank: two buckets (one fills while the other is sent), the largest tensor and its shards."""
        policy = self.models[0]
        sizes = dims(policy.facts)
        largest = max(sizes["vocab"], sizes["ffn"]) * sizes["hidden"] * policy.number_bytes
        return 2 * bucket_bytes(self.config.rollout, "cuda") + 2 * largest

    def _num_groups(self) -> int:
        """NCCL groups of more than one rank that this rank is in, and one more with attached or dedicated servers."""
        layouts = {_sizes(model.parallel, self.num_ranks) for model in self.models}
        groups = sum(size > 1 for sizes in layouts for size in sizes)
        return groups + (self.num_ranks > 1) + (not self.is_colocated)


def _in_layers(model: RunModel) -> float:
    """Number of parameters in the layers, without embedding and head."""
    return ParameterCount.sum(layer_parameters(model.facts)).number


def _sizes(parallel: ParallelConfig, num_ranks: int) -> tuple[int, ...]:
    """Sizes of Megatron's groups: tensor, context, pipeline, data, model; with expert parallelism also of the expert groups."""
    tp, pp, cp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.context_parallel_size
    ep, etp = parallel.expert_parallel_size, expert_tensor_size(parallel)
    dense = (tp, cp, pp, num_ranks // (tp * pp), tp * pp)
    return (*dense, ep, etp, ep * etp, num_ranks // (pp * ep * etp)) if ep > 1 else dense
