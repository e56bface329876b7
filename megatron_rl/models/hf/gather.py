"""Assembles full tensors from the ranks that own their shards.

The tensor-parallel ranks of the stage that owns a tensor send their shards to their first rank, which sends the
full tensor to its ``GatherTarget``. Among replicas (data- and context-parallel ranks) only the first ranks take
part. Experts have their own split: by expert over the expert-parallel ranks, and each expert over the
expert-tensor-parallel ranks. Consecutive tensors with the same sender, mainly a layer's experts, are sent as one
message.

Ranks wait for each other at each message; with ``GatherTarget.stage``, only ranks of the same stage do.

A parameter's owners follow from its name in the tables: its pipeline stage, and within the stage the expert's ranks.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.families.model_facts import dims
from megatron_rl.families.parameters import Entry, canonical_name
from megatron_rl.families.transforms import Dims
from megatron_rl.models.hf.tensor_sources import WeightsError
from megatron_rl.models.layers.torch_layers import PackedGPTModel, unwrap
from megatron_rl.parallel.topology import local_device

_EXPERT = re.compile(r"(\.mlp\.experts\.)(\d+)(\.)")
_ADAPTER = ".lora."


def dtypes_by_stage(parameters: dict[str, Tensor]) -> list[dict[str, torch.dtype]]:
    """For each pipeline stage, a map from parameter names (after ``any_expert``) to dtypes; collective over the stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    dtypes: list[dict[str, torch.dtype]] = [{} for _ in range(group.size())]
    # Names without the expert's index suffice: a stage has all experts of a layer or none, but a rank has only some.
    dist.all_gather_object(dtypes, {any_expert(name): p.dtype for name, p in parameters.items()}, group=group)
    return dtypes


def stage_of(entry: Entry, held: Sequence[dict[str, torch.dtype]]) -> int:
    """The pipeline stage that has ``entry``; ``held``: result of ``dtypes_by_stage``. Raises WeightsError if none has it."""
    key = any_expert(entry.megatron)
    for stage, names in enumerate(held):
        if key in names:
            return stage
    raise WeightsError(f"no pipeline stage has Megatron's parameter {entry.megatron}")


def first_rank_of(stage: int) -> int:
    """The first rank of pipeline stage ``stage``; in Megatron's order of ranks, a stage's ranks are consecutive."""
    return stage * (dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size())


def holders(entry: Entry, stage: int, sizes: Dims) -> Sequence[int]:
    """The ranks of ``stage`` that have ``entry`` or a shard of it."""
    first, expert = first_rank_of(stage), expert_of(entry.megatron)
    ranks = range(first, first_rank_of(stage + 1))
    if expert is None:
        return ranks
    num_shards = parallel_state.get_expert_tensor_parallel_world_size()
    num_splits = parallel_state.get_expert_model_parallel_world_size()
    split = expert // (sizes["experts"] // num_splits)
    return [rank for rank in ranks if (rank - first) // num_shards % num_splits == split]


def expert_of(name: str) -> int | None:
    """Index of the expert that a parameter (by its name in the tables) belongs to; None if it belongs to no expert."""
    match = _EXPERT.search(name)
    return int(match[2]) if match else None


def any_expert(name: str) -> str:
    """The name with a star for the expert's index, because ranks have the same parameters of different experts."""
    return _EXPERT.sub(r"\1*\3", name)


def named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of this rank by their names in the tables (``names_in_model``), without those of adapters."""
    return ((name, parameter) for name, parameter in _named(chunks) if _ADAPTER not in name)


def adapter_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of this rank's adapters by their names in the tables (``families/adapters.py``)."""
    return ((name, parameter) for name, parameter in _named(chunks) if _ADAPTER in name)


def _named(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for chunk in chunks:
        model = unwrap(chunk)
        name_of = names_in_model(model)
        # The routers' biases are buffers in Megatron but weights in a checkpoint.
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias"))
        for name, parameter in itertools.chain(model.named_parameters(), biases):
            yield name_of(name), parameter


def names_in_model(model: PackedGPTModel) -> Callable[[str], str]:
    """Function that maps a parameter's name in this chunk to its name in the tables, with layers and experts of the whole model."""
    global_layers = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    num_experts = model.config.num_moe_experts or 0
    first_expert = num_experts // model.config.expert_model_parallel_size * parallel_state.get_expert_model_parallel_rank()

    def name_of(name: str) -> str:
        name = canonical_name(name)
        match = re.match(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match:
            name = f"decoder.layers.{global_layers[int(match[1])]}.{match[2]}"
        expert = expert_of(name)
        if expert is not None:
            name = _EXPERT.sub(rf"\g<1>{expert + first_expert}\3", name)
        return name

    return name_of


MESSAGE_BYTES = 256 * 2**20
"""Largest message, unless a single tensor is larger: large enough to hide the latency of a message, and not larger,
because sender and receiver store the message in addition to the bucket that it is copied to."""


class GatherTarget(Enum):
    """Ranks that receive the full tensors of ``gather``."""

    driver = "driver"
    """All tensors on rank 0."""
    stage = "stage"
    """A pipeline stage's tensors on the stage's first rank; stages do not wait for each other."""
    everywhere = "everywhere"
    """All tensors on every rank."""


@dataclass(frozen=True)
class ShardedParameter:
    """A full (unsharded) parameter and the ranks that own its shards."""

    entry: Entry
    stage: int
    dtype: torch.dtype
    first: int
    """Global rank that gets the full tensor and sends it."""
    group: dist.ProcessGroup
    """The ranks that assemble the tensor."""
    is_here: bool
    """True if this rank is in ``group``."""

    @property
    def num_bytes(self) -> int:
        return sum(map(prod, self.entry.shapes)) * self.dtype.itemsize


def sharded_parameters(
    parameters: dict[str, Tensor], hf_config: PretrainedConfig, table: Sequence[Entry]
) -> list[ShardedParameter]:
    """The parameters of ``table``, of the whole model, in its order; collective over the stages.

    The result is the same at every call for the same model, so callers may cache it.
    """
    by_stage, sizes = dtypes_by_stage(parameters), dims(hf_config)
    held = []
    for entry in table:
        stage = stage_of(entry, by_stage)
        dtype = by_stage[stage][any_expert(entry.megatron)]
        held.append(ShardedParameter(entry, stage, dtype, *owners_of(entry, stage, sizes)))
    return held


def owners_of(entry: Entry, stage: int, sizes: Dims) -> tuple[int, dist.ProcessGroup, bool]:
    """(``first``, ``group``, ``is_here``) of a ``ShardedParameter``, for ``entry`` on pipeline stage ``stage``."""
    rank, expert = dist.get_rank(), expert_of(entry.megatron)
    group = parallel_state.get_tensor_model_parallel_group()
    first = first_rank_of(stage)
    if expert is not None:
        group = parallel_state.get_expert_tensor_parallel_group()
        experts_per_rank = sizes["experts"] // parallel_state.get_expert_model_parallel_world_size()
        first += group.size() * (expert // experts_per_rank)
    return first, group, first <= rank < first + group.size()


def gather(
    held: Iterable[ShardedParameter], parameters: Mapping[str, Tensor], sizes: Dims, to: GatherTarget
) -> Iterator[tuple[Entry, list[Tensor | None]]]:
    """Yield each entry, in order, with its full tensors on the ranks of ``to``, and with Nones on other ranks."""
    own_stage = parallel_state.get_pipeline_model_parallel_rank()
    if to is GatherTarget.stage:
        # Skipping the other stages' entries lets each stage run at its own pace.
        held = (parameter for parameter in held if parameter.stage == own_stage)
    for message in messages(held, to):
        target = first_rank_of(message[0].stage) if to is GatherTarget.stage else 0
        yield from collect(message, parameters, sizes, None if to is GatherTarget.everywhere else target)


def messages(held: Iterable[ShardedParameter], to: GatherTarget) -> Iterator[list[ShardedParameter]]:
    """Group consecutive entries with the same sender and dtype into messages.

    An entry whose sender is also its destination needs no sending and forms a separate message.
    """
    run: list[ShardedParameter] = []
    num_bytes = 0
    for item in held:
        target = first_rank_of(item.stage) if to is GatherTarget.stage else 0
        is_sent = to is GatherTarget.everywhere or item.first != target
        is_next = run and (item.stage, item.first, item.dtype) == (run[0].stage, run[0].first, run[0].dtype)
        if run and not (is_sent and is_next and num_bytes + item.num_bytes <= MESSAGE_BYTES):
            yield run
            run, num_bytes = [], 0
        run.append(item)
        num_bytes += item.num_bytes
    if run:
        yield run


def collect(
    message: Sequence[ShardedParameter], parameters: Mapping[str, Tensor], sizes: Dims, target: int | None
) -> Iterator[tuple[Entry, list[Tensor | None]]]:
    """Yield each entry of one message with its full tensors on rank ``target`` (None: all ranks), and Nones elsewhere."""
    rank, first = dist.get_rank(), message[0].first
    own = [_assemble(item, parameters.get(item.entry.megatron), sizes) for item in message] if message[0].is_here else []
    has_all, is_wanted = rank == first, target in (None, rank)
    flat = None
    if target is None or (first != target and (has_all or is_wanted)):
        flat = _flat(own) if has_all else _empty(message)
        if target is None:
            dist.broadcast(flat, src=first)
        else:
            _send(flat, source=first, target=target)
    start = 0
    for index, item in enumerate(message):
        tensors: list[Tensor | None] = [None] * len(item.entry.hf)
        if is_wanted and has_all:
            tensors = list(own[index] or tensors)
        elif is_wanted and flat is not None:
            for i, shape in enumerate(item.entry.shapes):
                tensors[i] = flat[start : start + prod(shape)].view(shape)
                start += prod(shape)
        yield item.entry, tensors


def _send(flat: Tensor, *, source: int, target: int) -> None:
    """Send ``flat`` from rank ``source`` to rank ``target``; both ranks call this function."""
    is_source = dist.get_rank() == source
    # Batched, because a batch uses the communicator of all ranks (topology.initialize); for a single message NCCL creates one
    # communicator per pair of ranks, which would be 31 more on a rank that receives experts of 31 others.
    message = dist.P2POp(dist.isend, flat, target) if is_source else dist.P2POp(dist.irecv, flat, source)
    for work in dist.batch_isend_irecv([message]):
        work.wait()


def _flat(own: Sequence[list[Tensor] | None]) -> Tensor:
    parts = [tensor.view(-1) for tensors in own for tensor in tensors or []]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _empty(message: Sequence[ShardedParameter]) -> Tensor:
    size = sum(prod(shape) for item in message for shape in item.entry.shapes)
    return torch.empty(size, dtype=message[0].dtype, device=local_device())


def _assemble(held: ShardedParameter, parameter: Tensor | None, sizes: Dims) -> list[Tensor] | None:
    """Full tensors of an entry on rank ``held.first``, None on the group's other ranks; collective over the group."""
    rank, entry = dist.get_rank(), held.entry
    if parameter is None:
        raise WeightsError(f"rank {rank} does not have Megatron's parameter {entry.megatron}, although it should")
    shards = [parameter.detach()]
    if entry.transform.is_split and held.group.size() > 1:
        shards = [torch.empty_like(parameter) for _ in range(held.group.size())] if rank == held.first else []
        dist.gather(parameter.detach().contiguous(), shards or None, dst=held.first, group=held.group)
    if rank != held.first:
        return None
    return [tensor.contiguous() for tensor in entry.transform.export(shards, sizes)]
