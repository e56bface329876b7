"""Assembles full tensors from the ranks that own their shards.

The tensor-parallel ranks of the stage that owns a tensor send their shards to their first rank, which sends the full
tensor to its ``GatherTarget``. Among replicas (data- and context-parallel ranks) only the first ranks take part. Experts
have their own split: by expert over the expert-parallel ranks, and each expert over the expert-tensor-parallel ranks.
Consecutive tensors with the same sender, mainly a layer's experts, are sent as one message.

Ranks wait for each other at each message; with ``Destination.stage``, only ranks of the same stage do.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.families.model_facts import dims
from megatron_rl.families.parameters import Entry, Role, entries
from megatron_rl.families.transforms import Dims
from megatron_rl.models.hf.parameter_owners import any_expert, dtypes_by_stage, expert_of, first_rank_of, stage_of
from megatron_rl.models.hf.tensor_sources import WeightsError
from megatron_rl.parallel.topology import local_device

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
class Owner:
    """The ranks (``group``) that assemble a tensor; global rank ``first`` gets the full tensor and sends it."""

    first: int
    group: dist.ProcessGroup
    is_here: bool


@dataclass(frozen=True)
class ShardedParameter:
    """A full (unsharded) parameter and the ranks that own its shards."""

    entry: Entry
    stage: int
    dtype: torch.dtype
    owner: Owner

    @property
    def num_bytes(self) -> int:
        return sum(map(prod, self.entry.shapes)) * self.dtype.itemsize


def sharded_parameters(parameters: dict[str, Tensor], hf_config: PretrainedConfig, role: Role) -> list[ShardedParameter]:
    """All parameters of the whole model, in the order of the files; collective over the stages.

    The result is the same at every call for the same model, so callers may cache it.
    """
    by_stage, sizes = dtypes_by_stage(parameters), dims(hf_config)
    held = []
    for entry in entries(hf_config, role):
        stage = stage_of(entry, by_stage)
        held.append(ShardedParameter(entry, stage, by_stage[stage][any_expert(entry.megatron)], owner_of(entry, stage, sizes)))
    return held


def owner_of(entry: Entry, stage: int, sizes: Dims) -> Owner:
    """The ranks that assemble ``entry`` on pipeline stage ``stage``."""
    rank, expert = dist.get_rank(), expert_of(entry.megatron)
    group = parallel_state.get_tensor_model_parallel_group()
    first = first_rank_of(stage)
    if expert is not None:
        group = parallel_state.get_expert_tensor_parallel_group()
        experts_per_rank = sizes["experts"] // parallel_state.get_expert_model_parallel_world_size()
        first += group.size() * (expert // experts_per_rank)
    return Owner(first, group, first <= rank < first + group.size())


def gather(
    held: Iterable[ShardedParameter], parameters: dict[str, Tensor], sizes: Dims, to: GatherTarget
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
        is_sent = to is GatherTarget.everywhere or item.owner.first != target
        is_next = run and (item.stage, item.owner.first, item.dtype) == (run[0].stage, run[0].owner.first, run[0].dtype)
        if run and not (is_sent and is_next and num_bytes + item.num_bytes <= MESSAGE_BYTES):
            yield run
            run, num_bytes = [], 0
        run.append(item)
        num_bytes += item.num_bytes
    if run:
        yield run


def collect(
    message: Sequence[ShardedParameter], parameters: dict[str, Tensor], sizes: Dims, target: int | None
) -> Iterator[tuple[Entry, list[Tensor | None]]]:
    """Yield each entry of one message with its full tensors on rank ``target`` (None: all ranks), and Nones elsewhere."""
    rank, owner = dist.get_rank(), message[0].owner
    own = [_assemble(item, parameters.get(item.entry.megatron), sizes) for item in message] if owner.is_here else []
    has_all, is_wanted = rank == owner.first, target in (None, rank)
    flat = None
    if target is None or (owner.first != target and (has_all or is_wanted)):
        flat = _flat(own) if has_all else _empty(message)
        if target is None:
            dist.broadcast(flat, src=owner.first)
        else:
            _send(flat, source=owner.first, target=target)
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
    """Full tensors of an entry on rank ``owner.first``, None on the group's other ranks; collective over the group."""
    rank, owner, entry = dist.get_rank(), held.owner, held.entry
    if parameter is None:
        raise WeightsError(f"rank {rank} does not have Megatron's parameter {entry.megatron}, although it should")
    shards = [parameter.detach()]
    if entry.transform.is_split and owner.group.size() > 1:
        shards = [torch.empty_like(parameter) for _ in range(owner.group.size())] if rank == owner.first else []
        dist.gather(parameter.detach().contiguous(), shards or None, dst=owner.first, group=owner.group)
    if rank != owner.first:
        return None
    return [tensor.contiguous() for tensor in entry.transform.export(shards, sizes)]
