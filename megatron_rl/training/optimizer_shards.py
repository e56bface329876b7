"""The optimizer's state in checkpoints: each rank's own shard, under the names and shapes of the weights.

A rank of the distributed optimizer has a range of the elements of some weights. Such a range of a row-major tensor
consists of a few boxes (the end of a row, whole rows, the start of a row), which Megatron's format can store and
split again. So nothing is gathered or copied: in any layout, views of the state itself are written and read. The
names are those of Megatron's "fully_reshardable" format, whose checkpoints can be read as well.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.training.optimizer import optimizer_parts, weight_states

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) per axis."""


def sharded_state(optimizer: MegatronOptimizer, weights: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    """This rank's shard of the optimizer state; ``weights``: the sharded state dicts of the chunks."""
    sharded, _ = extract_sharded_tensors_and_factories(dict(weights))
    # By identity, because the state dicts refer to the weights themselves.
    found = {id(entry.data): entry for entry in nested_values(sharded)}
    pieces: list[ShardedTensor] = []
    for part in optimizer_parts(optimizer):
        for buffer in part.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for weight, ranges in bucket["param_map"].items():
                        for name, values in weight_states(part, weight).items():
                            pieces += _pieces_of(found[id(weight)], name, values.detach(), ranges["param"].start)
    return {str(index): piece for index, piece in enumerate(pieces)}


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements start to stop of a row-major tensor as boxes, in their order; at most 2 * len(shape) - 1."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    whole_from, whole_to = -(-start // row), stop // row
    if whole_from > whole_to:  # inside one row
        yield from _in_row(shape, whole_to, start, stop)
        return
    yield from _in_row(shape, whole_from - 1, start, whole_from * row)
    if whole_from < whole_to:
        yield (whole_from, *(0 for _ in shape[1:])), (whole_to - whole_from, *shape[1:])
    yield from _in_row(shape, whole_to, whole_to * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    before = index * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - before, stop - before):
        yield (index, *offset), (1, *size)


def _pieces_of(
    weight: ShardedTensor | ShardedTensorFactory, name: str, values: Tensor, start: int
) -> Iterator[ShardedTensor]:
    """``values`` [n]: the state ``name`` of the n elements of the weight from ``start`` on."""
    key, local = (
        f"optimizer.state.{name}.{weight.key}",
        torch.empty_like(weight.data, device="meta", dtype=values.dtype),
    )
    if isinstance(weight, ShardedTensorFactory):
        # Such a weight is stored as several tensors, which are views of it: their offsets are those of the parts.
        parts = list(nested_values({"": weight.build_fn(key, local, weight.replica_id, None)}))
    else:
        parts = [replace(weight, key=key, data=local, dtype=values.dtype)]
    for part in parts:
        if not part.data.is_contiguous():
            raise NotImplementedError(f"{key}: a part that is not a range of the weight's elements")
        # The meta tensor has the weight's layout, so its offset is the part's place in the weight.
        begin = part.data.storage_offset()
        first, last = max(start, begin), min(start + len(values), begin + part.data.numel())
        position = first - start
        for offset, size in boxes(part.local_shape, first - begin, last - begin):
            yield _piece(part, values[position : position + math.prod(size)], offset, size)
            position += math.prod(size)


def _piece(part: ShardedTensor, values: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> ShardedTensor:
    size = (*(1 for _ in range(part.prepend_axis_num)), *size)
    offset = (*(0 for _ in range(part.prepend_axis_num)), *offset)
    return replace(
        part,
        data=values.view(size),
        local_shape=size,
        global_offset=tuple(a + b for a, b in zip(part.global_offset, offset, strict=True)),
        axis_fragmentations=None,  # boxes form no regular grid
        # Replicated like the weight over tensor-parallel ranks and stages, but not over data-parallel ranks.
        replica_id=(*part.replica_id[:2], 0),
        prepend_axis_num=0,
    )
