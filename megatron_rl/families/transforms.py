"""Converts Hugging Face tensors to Megatron parameters and back, under tensor parallelism.

A transform reads only one rank's slices of the full tensors (``load``), and assembles the full tensors from the
shards of all tensor-parallel ranks (``export``). Invariant: ``export`` of the loaded shards returns the same bits.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Dims = Mapping[str, int]
"""Maps size names (hidden, q, kv, groups, head_dim, ffn, vocab, ...) to sizes; see ``facts.dims``."""


@dataclass(frozen=True)
class Shard:
    """Index (``rank``) of one of ``size`` equal slices of a split tensor."""

    rank: int
    size: int

    def range(self, length: int) -> slice:
        if length % self.size != 0:
            raise ValueError(f"{length} rows do not divide by parallel.tensor_parallel_size {self.size}")
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


class Sliceable(Protocol):
    """A full Hugging Face tensor that can be read in slices: a safetensors slice or a torch tensor."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


class Transform(Protocol):
    """Conversion of a checkpoint's tensors to one Megatron parameter, and back."""

    is_split: bool
    """True if the tensor-parallel ranks have different slices, False if all have the same tensor."""

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        """This rank's Megatron parameter, from the full tensors."""
        ...

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        """The full Hugging Face tensors, from every rank's parameter (one of them if not split)."""
        ...


@dataclass(frozen=True)
class Replicated:
    """The same tensor on every rank."""

    is_split = False

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        return tensors[0][:]

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Stacked:
    """``count`` tensors of equal shape, one below the other, the same on every rank."""

    count: int
    is_split = False

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        return torch.cat([tensor[:] for tensor in tensors])

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        return list(shards[0].chunk(self.count))


@dataclass(frozen=True)
class ColumnParallel:
    """Split by output features (Megatron's column-parallel layers)."""

    is_split = True

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        return tensors[0][shard.range(_length(tensors[0], 0))]

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(list(shards), dim=0)]


@dataclass(frozen=True)
class RowParallel:
    """Split by input features (Megatron's row-parallel layers)."""

    is_split = True

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        return tensors[0][:, shard.range(_length(tensors[0], 1))]

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(list(shards), dim=1)]


@dataclass(frozen=True)
class QKV:
    """Query, key and value in one parameter: queries, key and value of each key-value group. Weights and biases."""

    is_split = True

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        groups = shard.range(dims["groups"])
        parts = []
        # Megatron orders the rows by group, so a rank's shard is whole groups of queries with their key and value.
        for tensor, total in zip(tensors, (dims["q"], dims["kv"], dims["kv"]), strict=True):
            rows_per_group = total // dims["groups"]
            part = tensor[groups.start * rows_per_group : groups.stop * rows_per_group]
            parts.append(part.unflatten(0, (-1, rows_per_group)))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        queries, head_dim = dims["q"] // dims["groups"], dims["head_dim"]
        full = torch.cat(list(shards)).unflatten(0, (dims["groups"], -1))
        return [part.flatten(0, 1).contiguous() for part in full.split([queries, head_dim, head_dim], dim=1)]


@dataclass(frozen=True)
class GatedQKV:
    """``QKV`` with an output gate: files have each head's query and gate in turn, Megatron a group's queries, then its gates."""

    is_split = True

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        groups, head_dim = shard.range(dims["groups"]), dims["head_dim"]
        query, *others = (
            tensor[groups.start * rows // dims["groups"] : groups.stop * rows // dims["groups"]]
            for tensor, rows in zip(tensors, (2 * dims["q"], dims["kv"], dims["kv"]), strict=True)
        )
        heads = dims["q"] // dims["groups"] // head_dim
        query = query.unflatten(0, (-1, heads, 2, head_dim)).transpose(1, 2).flatten(1, 3)
        return torch.cat([query, *(part.unflatten(0, (-1, head_dim)) for part in others)], dim=1).flatten(0, 1)

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        queries, head_dim = dims["q"] // dims["groups"], dims["head_dim"]
        full = torch.cat(list(shards)).unflatten(0, (dims["groups"], -1))
        query, *others = full.split([2 * queries, head_dim, head_dim], dim=1)
        query = query.unflatten(1, (2, -1, head_dim)).transpose(1, 2).flatten(1, 3)
        return [part.flatten(0, 1).contiguous() for part in (query, *others)]


@dataclass(frozen=True)
class Sections:
    """Several sections of rows in one parameter, each split over the ranks; each of the files' tensors has some of them."""

    parts: tuple[tuple[str, ...], ...]
    """For each of the files' tensors, the size names of its sections."""
    heads: str = ""
    """Size name of the heads by which the files order the rows, each with its part of every section; empty: section by section."""
    is_split = True

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        pairs = zip(tensors, self.parts, strict=True)
        return torch.cat([part for tensor, names in pairs for part in self._own(tensor, names, dims, shard)])

    def _own(self, tensor: Sliceable, names: Sequence[str], dims: Dims, shard: Shard) -> list[Tensor]:
        """This rank's rows of the sections ``names`` of ``tensor``."""
        if self.heads:
            own, widths = shard.range(dims[self.heads]), [dims[name] // dims[self.heads] for name in names]
            rows = tensor[own.start * sum(widths) : own.stop * sum(widths)].unflatten(0, (-1, sum(widths)))
            return [part.flatten(0, 1) for part in rows.split(widths, 1)]
        starts = itertools.accumulate((dims[name] for name in names), initial=0)
        ranges = [(start, shard.range(dims[name])) for name, start in zip(names, starts, strict=False)]
        return [tensor[start + own.start : start + own.stop] for start, own in ranges]

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        sizes = [dims[name] // len(shards) for names in self.parts for name in names]
        sections = iter([torch.cat(parts) for parts in zip(*(shard.split(sizes) for shard in shards), strict=True)])
        tensors = []
        for names in self.parts:
            own = [section for _, section in zip(names, sections, strict=False)]
            by_head = [section.unflatten(0, (dims[self.heads], -1)) for section in own] if self.heads else []
            tensors.append(torch.cat(by_head, 1).flatten(0, 1) if by_head else torch.cat(own))
        return tensors


@dataclass(frozen=True)
class GatedMLP:
    """Gate and up projection in one parameter: on each rank the gate's rows, then the up projection's rows."""

    is_split = True

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        # Slice before concatenating: the first half of the concatenated tensor would be the whole gate.
        return torch.cat([tensor[shard.range(_length(tensor, 0))] for tensor in tensors])

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]


@dataclass(frozen=True)
class Transposed:
    """Applies the transform ``inner`` to a tensor that files store transposed.

    ``halves``: the file's tensor is two tensors side by side, which ``inner`` gets separately.
    """

    inner: Transform
    halves: bool = False
    is_split = True

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        (tensor,) = tensors
        num_columns = _length(tensor, 1)
        width = num_columns // (2 if self.halves else 1)
        # Views instead of a transposed copy, so that only this rank's slices are read from the file.
        views = [_TransposedView(tensor, start, width) for start in range(0, num_columns, width)]
        return self.inner.load(views, dims, shard).contiguous()

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(self.inner.export(shards, dims)).T]


class _TransposedView:
    """Columns [start, start + width) of a tensor [n, m], sliced like the rows of a tensor [width, n]."""

    def __init__(self, tensor: Any, start: int, width: int) -> None:
        self.tensor, self.start, self.width = tensor, start, width

    def get_shape(self) -> list[int]:
        return [self.width, _length(self.tensor, 0)]

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        first, last, _ = rows.indices(self.width)
        return self.tensor[columns, self.start + first : self.start + last].T


@dataclass(frozen=True)
class Interleaved:
    """Applies the transform ``inner`` to two tensors whose rows (or elements) alternate in the file's tensor."""

    inner: Transform
    is_split = True

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        (tensor,) = tensors
        return self.inner.load([_EverySecond(tensor, start) for start in range(2)], dims, shard)

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.stack(self.inner.export(shards, dims), dim=1).flatten(0, 1)]


class _EverySecond:
    """Rows start, start + 2, ... of a tensor, sliced like a tensor of these rows."""

    def __init__(self, tensor: Any, start: int) -> None:
        self.tensor, self.start = tensor, start

    def get_shape(self) -> list[int]:
        return [_length(self.tensor, 0) // 2]

    def __getitem__(self, rows: slice) -> Tensor:
        first, last, _ = rows.indices(_length(self.tensor, 0) // 2)
        # safetensors reads contiguous slices only.
        return self.tensor[2 * first : 2 * last][self.start :: 2]


@dataclass(frozen=True)
class VocabParallel:
    """Split by token id; zero rows pad the vocabulary to a multiple of the tensor-parallel size."""

    is_split = True

    def load(self, tensors: Sequence[Sliceable], dims: Dims, shard: Shard) -> Tensor:
        rows = shard.range(padded_vocab_size(dims["vocab"], shard.size))
        # min, because a rank's shard may be padding only.
        part = tensors[0][min(rows.start, dims["vocab"]) : min(rows.stop, dims["vocab"])]
        return F.pad(part, (0, 0, 0, rows.stop - rows.start - part.shape[0]))

    def export(self, shards: Sequence[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(list(shards))[: dims["vocab"]]]


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """``vocab_size`` rounded up to a multiple of ``tp_size``."""
    return -(-vocab_size // tp_size) * tp_size


def _length(tensor: Any, dim: int) -> int:
    shape = tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()
    return shape[dim]
