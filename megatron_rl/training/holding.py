"""What the replicas hold of a step's sequences: the driver's account of it, and the sequences on a rank. No collectives.

A sequence's tokens are sent once to a replica that works on it, and each *column*, one number (or one row of numbers) per
token, likewise. A call names sequences and columns by numbers. Columns are known by the driver's tensors: one that was sent,
or that ranks answered and kept, is not sent again as long as it is this very tensor. So tensors are not changed in place.
What a rank of this machine lacks it reads where it lies: tokens and routes in the rollout workers' files, as they came from
the servers, and the rest in a file of the driver's.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import TOKENS, PackedBatch, Parts, cu_seqlens_of
from megatron_rl.parallel.collectives import Pieces
from megatron_rl.parallel.topology import Topology
from megatron_rl.system.shared_file import SharedArrays, address_of
from megatron_rl.training.batching import Plan
from megatron_rl.training.held_images import Cut, HeldImages, ImageCutting, SentImages


@dataclass
class _Column:
    values: Tensor | Parts | None
    """[T, ...] on the driver, of the batch it came with; None: the ranks alone have it."""
    holders: list[set[int] | None]
    """By replica: numbers of the sequences that it has it of; None: it has never heard of it."""
    shared: np.ndarray | None = None
    """``values`` where other processes can map them."""


class Ledger:
    """The driver's account of one layout, for one step."""

    def __init__(self, num_replicas: int, shared: SharedArrays | None = None) -> None:
        """``shared``: for what ranks of this machine are to map; None: there are no others."""
        self._shared = shared
        self._addressed: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        """By its id: an array, itself or its copy where others can map it, and the numbers of its address."""
        self.homes: dict[Hashable, int] = {}
        """Sequence -> the replica that works on it, where that is settled."""
        self.routes: dict[str, int] = {}
        """By engine: the column of the experts that its updates follow, where the ranks alone have it."""
        self._numbers: dict[Hashable, int] = {}
        self._held: list[set[int]] = [set() for _ in range(num_replicas)]
        self._images = SentImages(num_replicas)
        self._columns: list[_Column] = []

    def column(self, values: Tensor | Parts | None = None) -> int:
        """The number of a column: of the one that ``values`` are, or of a new one."""
        for number, column in enumerate(self._columns):
            if values is not None and column.values is values:
                return number
        self._columns.append(_Column(values, [None] * len(self._held)))
        return len(self._columns) - 1

    def answered(self, column: int, keys: Sequence[Hashable], plan: Plan, values: Tensor | None = None) -> None:
        """The ranks keep their answers to a call as ``column``; ``values``: what the driver got of them."""
        self._columns[column].values = values
        for replica, microbatches in enumerate(plan):
            numbers = {self._numbers[keys[index]] for indices in microbatches for index in indices}
            self._columns[column].holders[replica] = numbers

    def payloads(
        self, batch: PackedBatch, keys: Sequence[Hashable], plan: Plan, columns: Sequence[int]
    ) -> list[dict[str, Tensor | Pieces]]:
        """By replica: its micro-batches, and what it lacks for them. ``keys``: what names the batch's sequences."""
        return [self._payload(batch, keys, replica, columns, of) for replica, of in enumerate(plan)]

    def _payload(
        self,
        batch: PackedBatch,
        keys: Sequence[Hashable],
        replica: int,
        columns: Sequence[int],
        microbatches: Sequence[Sequence[int]],
    ) -> dict[str, Tensor | Pieces]:
        number_of = {
            index: self._numbers.setdefault(keys[index], len(self._numbers))
            for indices in microbatches
            for index in indices
        }
        payload: dict[str, Tensor | Pieces] = {
            "microbatch_sizes": _int32([len(indices) for indices in microbatches]),
            "sequences": _int32(list(number_of.values())),
        }
        new = [index for index, number in number_of.items() if number not in self._held[replica]]
        self._held[replica].update(number_of.values())
        payload |= {
            "new": _int32([number_of[index] for index in new]),
            "lengths": batch.lengths[torch.tensor(new, dtype=torch.int64)].to(torch.int32),
        }
        if TOKENS in batch.parts:
            payload["tokens"] = self._parts(batch.parts[TOKENS], new)
        else:
            # Ids of any vocabulary fit half the bytes.
            payload["tokens"] = batch.taken(batch.tokens, new).to(torch.int32)
        if batch.images is not None:
            payload |= self._images.payload(batch.images, new, replica, self._pieces)
        for number in columns:
            column = self._columns[number]
            there = column.holders[replica]
            lacking = [index for index in number_of if there is None or number_of[index] not in there]
            if column.values is not None and (lacking or there is None):
                payload[f"of/{number}"] = _int32([number_of[index] for index in lacking])
                payload[f"column/{number}"] = self._rows(batch, column, lacking)
                column.holders[replica] = (there or set()).union(number_of[index] for index in lacking)
        return payload

    def _rows(self, batch: PackedBatch, column: _Column, indices: Sequence[int]) -> Tensor | Pieces:
        """Those of the sequences ``indices``."""
        values = column.values
        if isinstance(values, Parts):
            return self._parts(values, indices)
        assert values is not None
        if self._shared is None or not indices or not len(values):
            return batch.taken(values, indices)
        if column.shared is None:
            column.shared = self._shared.put(values.numpy())
        borders, row_bytes = batch.cu_seqlens.numpy(), column.shared[:1].nbytes
        addresses = np.repeat(_numbers(column.shared)[None], len(indices), 0)
        addresses[:, 4] += borders[indices] * row_bytes
        addresses[:, 5] = (borders[1:] - borders[:-1])[indices] * row_bytes
        starts, ends = borders[indices].tolist(), borders[1:][indices].tolist()
        return Pieces([column.shared[start:end] for start, end in zip(starts, ends, strict=True)], addresses)

    def _parts(self, parts: Parts, indices: Sequence[int]) -> Pieces:
        """Those of the sequences ``indices``."""
        arrays = [array for index in indices for array in parts.by_sequence[index] if len(array)]
        return self._pieces(arrays or [parts.by_sequence[0][0][:0]])

    def _pieces(self, arrays: Sequence[np.ndarray]) -> Pieces:
        """Of these, of which many are in other payloads too."""
        arrays = arrays or [np.zeros(0, np.uint8)]
        if self._shared is None or not len(arrays[0]):
            return Pieces(arrays)
        return Pieces(arrays, np.array([self._address(array, self._shared) for array in arrays]))

    def _address(self, array: np.ndarray, shared: SharedArrays) -> np.ndarray:
        """[6] its numbers: many responses have one prompt, and a replica may ask again."""
        if id(array) not in self._addressed:
            there = shared.put(array)
            self._addressed[id(array)] = array, there, _numbers(there)
        return self._addressed[id(array)][2]


@dataclass(frozen=True)
class About:
    """The batch of a call, as the ledger of its layout knows it."""

    engine: str
    batch: PackedBatch
    lengths: list[int]
    step: int | None
    """None: of no step, nothing of it is kept."""
    ledger: Ledger
    keys: Sequence[Any]
    """What names its sequences."""


class Held:
    """Sequences on this rank, by their numbers, on the CPU."""

    def __init__(self, cut: Cut = lambda number, file: None) -> None:
        """``cut``: begins to cut those images that are this rank's to cut."""
        self._tokens: dict[int, Tensor] = {}
        self.images = HeldImages(cut)
        self._columns: dict[int, dict[int, Tensor]] = {}
        self._empty: dict[int, Tensor] = {}
        """By column: no rows of it."""

    def take(self, payload: Mapping[str, Tensor], fields: Mapping[str, int]) -> "Share":
        """This rank's micro-batches of a call, whose ``fields`` are columns; what is new of them stays here."""
        new, lengths = payload["new"].tolist(), payload["lengths"].tolist()
        self._tokens |= dict(zip(new, payload["tokens"].split(lengths), strict=True))
        has_images = "images" in payload
        if has_images:
            self.images.take(payload, new)
        for name, values in payload.items():
            if name.startswith("column/"):
                column = int(name.removeprefix("column/"))
                self._add(column, payload[f"of/{column}"].tolist(), values)
        plan = [part.tolist() for part in payload["sequences"].split(payload["microbatch_sizes"].tolist())]
        return Share([self._microbatch(numbers, fields, has_images) for numbers in plan], plan, self)

    def keep(self, column: int, plan: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> None:
        """``parts`` of micro-batches as a column; ranks before the last stage have none."""
        for numbers, values in zip(plan, parts, strict=False):
            self._add(column, numbers, values.cpu())

    def _add(self, column: int, numbers: Sequence[int], values: Tensor) -> None:
        rows = values.split([len(self._tokens[number]) for number in numbers])
        self._columns.setdefault(column, {}).update(zip(numbers, rows, strict=False))
        self._empty[column] = values[:0]

    def _microbatch(self, numbers: Sequence[int], fields: Mapping[str, int], has_images: bool) -> PackedBatch:
        rows = [self._tokens[number] for number in numbers]
        return PackedBatch(
            tokens=torch.cat([torch.zeros(0, dtype=torch.int32), *rows]).to(torch.int64),
            cu_seqlens=cu_seqlens_of(torch.tensor([len(row) for row in rows], dtype=torch.int64)),
            fields={
                name: torch.cat([self._empty[column], *(self._columns[column][number] for number in numbers)])
                for name, column in fields.items()
                # Answers are where they were computed: on the last stage, which alone reads them.
                if column in self._empty and self._columns[column].keys() >= set(numbers)
            },
            images=self.images.of(numbers) if has_images else None,
        )


class HeldOfSteps:
    """Sequences on this rank, by layout and step."""

    def __init__(self, cutting: ImageCutting) -> None:
        self._cutting = cutting
        self._held: dict[tuple[int, int], Held] = {}

    def of(self, place: Topology, parallel: ParallelConfig, step: int | None) -> Held:
        """``step`` None: of no step, nothing of it is kept."""
        if step is None:
            return Held(self._cutting.share_of(place, parallel))
        if (place.layout, step) not in self._held:
            self._held[place.layout, step] = Held(self._cutting.share_of(place, parallel))
        return self._held[place.layout, step]

    def release(self, step: int | None) -> None:
        """Forget the sequences of ``step``; None: of every step."""
        for key in [key for key in self._held if step in (None, key[1])]:
            self._held.pop(key).images.drop()


@dataclass(frozen=True)
class Share:
    """A rank's part of the batch of a call."""

    microbatches: list[PackedBatch] = field(default_factory=list)
    plan: list[list[int]] = field(default_factory=list)
    """By micro-batch, the numbers of its sequences."""
    held: Held = field(default_factory=Held)

    def keep(self, column: int, parts: Sequence[Tensor]) -> None:
        """Answers, one tensor [tokens, ...] per micro-batch, stay here as a column."""
        self.held.keep(column, self.plan, parts)


def _numbers(array: np.ndarray) -> np.ndarray:
    """[6] int64: of the address of an array that others can map."""
    address = address_of(array)
    assert address is not None  # it has been put there
    return np.array((address.pid, address.fd, *address.place))


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
