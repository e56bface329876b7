"""Whole tensors from the ranks that hold shards of them.

The tensor-parallel ranks of the stage that owns a tensor send their shards to the first of them, which sends the whole tensor
where it is wanted (``GatherTarget``). Of the ranks that hold copies (data- and context-parallel ones) only the first take
part. Experts have their own split: by expert over the expert-parallel ranks, each within those over the
expert-tensor-parallel ranks. What one rank sends of tensors that follow one another, a layer's experts above all, goes as one
message.
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
"""Most that goes as one message, but for a larger tensor: enough that its start costs nothing next to it, and no more, for sender
and receiver hold it beside the bucket that it goes to."""


class GatherTarget(Enum):
    """Where ``gather`` puts a model's tensors together."""

    driver = "driver"
    """All of them on rank 0."""
    stage = "stage"
    """Those of a pipeline stage on the stage's first rank; stages do not wait for each other."""
    everywhere = "everywhere"
    """All of them on every rank."""


@dataclass(frozen=True)
class Owner:
    """The ranks that put a tensor together: ``group`` of them, of which global rank ``first`` sends it on."""

    first: int
    group: dist.ProcessGroup
    is_here: bool


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of the whole model, and who has it."""

    entry: Entry
    stage: int
    dtype: torch.dtype
    owner: Owner

    @property
    def num_bytes(self) -> int:
        return sum(map(prod, self.entry.shapes)) * self.dtype.itemsize


def sharded_parameters(parameters: dict[str, Tensor], hf_config: PretrainedConfig, role: Role) -> list[ShardedParameter]:
    """Every parameter of the whole model, in the order of the files; collective over the stages, and the same from one call to the
    next.
    """
    by_stage, sizes = dtypes_by_stage(parameters), dims(hf_config)
    held = []
    for entry in entries(hf_config, role):
        stage = stage_of(entry, by_stage)
        held.append(ShardedParameter(entry, stage, by_stage[stage][any_expert(entry.megatron)], owner_of(entry, stage, sizes)))
    return held


def owner_of(entry: Entry, stage: int, sizes: Dims) -> Owner:
    """Who puts ``entry`` together on pipeline stage ``stage``."""
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
    """Each entry, in order, with what its transform gives of it: tensors on the ranks that ``to`` names, Nones elsewhere."""
    own_stage = parallel_state.get_pipeline_model_parallel_rank()
    if to is GatherTarget.stage:
        # The stages go at their own pace: none waits for another's tensors.
        held = (one for one in held if one.stage == own_stage)
    for message in messages(held, to):
        target = first_rank_of(message[0].stage) if to is GatherTarget.stage else 0
        yield from collect(message, parameters, sizes, None if to is GatherTarget.everywhere else target)


def messages(held: Iterable[ShardedParameter], to: GatherTarget) -> Iterator[list[ShardedParameter]]:
    """Runs of entries that one rank sends on in one message, of one dtype; an entry that is where it is wanted is alone."""
    run: list[ShardedParameter] = []
    num_bytes = 0
    for one in held:
        target = first_rank_of(one.stage) if to is GatherTarget.stage else 0
        travels = to is GatherTarget.everywhere or one.owner.first != target
        is_next = run and (one.stage, one.owner.first, one.dtype) == (run[0].stage, run[0].owner.first, run[0].dtype)
        if run and not (travels and is_next and num_bytes + one.num_bytes <= MESSAGE_BYTES):
            yield run
            run, num_bytes = [], 0
        run.append(one)
        num_bytes += one.num_bytes
    if run:
        yield run


def collect(
    message: Sequence[ShardedParameter], parameters: dict[str, Tensor], sizes: Dims, target: int | None
) -> Iterator[tuple[Entry, list[Tensor | None]]]:
    """Each entry of one message with its whole tensors on rank ``target`` (None: on all ranks), Nones elsewhere."""
    rank, owner = dist.get_rank(), message[0].owner
    own = [_put_together(one, parameters.get(one.entry.megatron), sizes) for one in message] if owner.is_here else []
    has_all, is_wanted = rank == owner.first, target in (None, rank)
    flat = None
    if target is None or (owner.first != target and (has_all or is_wanted)):
        flat = _flat(own) if has_all else _empty(message)
        if target is None:
            dist.broadcast(flat, src=owner.first)
        else:
            _pass_on(flat, source=owner.first, target=target)
    start = 0
    for index, one in enumerate(message):
        tensors: list[Tensor | None] = [None] * len(one.entry.hf)
        if is_wanted and has_all:
            tensors = list(own[index] or tensors)
        elif is_wanted and flat is not None:
            for i, shape in enumerate(one.entry.shapes):
                tensors[i] = flat[start : start + prod(shape)].view(shape)
                start += prod(shape)
        yield one.entry, tensors


def _pass_on(flat: Tensor, *, source: int, target: int) -> None:
    """From one rank to another, both of which call it."""
    is_source = dist.get_rank() == source
    # In a batch it goes through the communicator of all ranks (topology.initialize); alone, NCCL makes one for each pair, and a
    # rank with experts of 31 others would have 31 more.
    message = dist.P2POp(dist.isend, flat, target) if is_source else dist.P2POp(dist.irecv, flat, source)
    for work in dist.batch_isend_irecv([message]):
        work.wait()


def _flat(own: Sequence[list[Tensor] | None]) -> Tensor:
    parts = [tensor.view(-1) for tensors in own for tensor in tensors or []]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _empty(message: Sequence[ShardedParameter]) -> Tensor:
    size = sum(prod(shape) for one in message for shape in one.entry.shapes)
    return torch.empty(size, dtype=message[0].dtype, device=local_device())


def _put_together(held: ShardedParameter, parameter: Tensor | None, sizes: Dims) -> list[Tensor] | None:
    """The whole tensors of an entry on rank ``owner.first``, None on the others of its group; collective over the group."""
    rank, owner, entry = dist.get_rank(), held.owner, held.entry
    if parameter is None:
        raise WeightsError(f"rank {rank} does not hold Megatron's parameter {entry.megatron}, though it should")
    shards = [parameter.detach()]
    if entry.transform.is_split and owner.group.size() > 1:
        shards = [torch.empty_like(parameter) for _ in range(owner.group.size())] if rank == owner.first else []
        dist.gather(parameter.detach().contiguous(), shards or None, dst=owner.first, group=owner.group)
    if rank != owner.first:
        return None
    return [tensor.contiguous() for tensor in entry.transform.export(shards, sizes)]
