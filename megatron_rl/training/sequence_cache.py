"""What the replicas hold of a step's sequences: the driver's account of it, and the sequences on a rank. No collectives.

A sequence's tokens are sent once to a replica that works on it, and each *column*, one number (or one row of numbers) per
token, likewise. A call names sequences and columns by numbers. Columns are known by the driver's tensors: one that was sent,
or that ranks answered and kept, is not sent again as long as it is this very tensor. So tensors are not changed in place.
What a rank of this machine lacks it reads where it lies: tokens and routes in the rollout workers' files, as they came from
the servers, and the rest in a file of the driver's. It is put together for a micro-batch, and held nowhere else. So the driver
keeps all of it, unchanged, until the step is released: by then each rank has read the last of it, as it had to for the answer
to the step's last call.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import TOKENS, PackedBatch, Parts, cu_seqlens_of
from megatron_rl.parallel.collectives import Payload, Pieces
from megatron_rl.parallel.topology import Topology
from megatron_rl.system.files.shared_file import SharedArrays, address_of
from megatron_rl.training.batching import Plan
from megatron_rl.training.image_cache import Cut, ImageCache, ImageDirectory, ImagePatcher
from megatron_rl.training.microbatch_io import reply_spans


@dataclass
class _Column:
    values: Tensor | Parts | None
    """[T, ...] on the driver, of the batch it came with; None: the ranks alone have it."""
    has: np.ndarray
    """[replicas, sequences] bool, by their numbers: which replica has it of which sequence."""
    heard: np.ndarray
    """[replicas] bool: which ones know of it."""
    rows: "_Rows | None" = None
    """``values`` as they are sent."""


class _Rows:
    """Rows of a batch's sequences: where they lie."""

    def __init__(
        self, arrays: list[np.ndarray], counts: np.ndarray, nothing: np.ndarray, placed: tuple[np.ndarray, Any] | None = None
    ) -> None:
        """``counts`` [N]: arrays of each sequence. ``placed``: of ``_addresses``; None: they need none."""
        self.arrays, self.counts, self.nothing = arrays, counts, nothing
        self.starts: np.ndarray | None = None
        """[N] int32: where they start in each sequence, whatever stretches a later batch speaks of; None: at its start."""
        self._firsts = np.cumsum(counts) - counts
        self._is_one_each = bool((counts == 1).all())
        self._placed = placed

    @classmethod
    def of(cls, values: Tensor | Parts, batch: PackedBatch, shared: SharedArrays | None) -> "_Rows":
        if isinstance(values, Parts):
            counts = np.fromiter(map(len, values.by_sequence), np.int64, len(values.by_sequence))
            arrays = [array for arrays in values.by_sequence for array in arrays]
            return cls(arrays, counts, values.nothing, None if shared is None else _addresses(arrays, shared))
        batch = batch if values.dim() == 1 else replace(batch, spans=None)
        numbers, (firsts, ends) = values.numpy(), reply_spans(batch)
        arrays = [numbers[first:end] for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]
        placed = None if shared is None else _put(arrays, shared)  # tensors are the driver's own
        found = cls(arrays, np.ones(len(arrays), np.int64), numbers[:0], placed)
        found.starts = None if batch.spans is None else batch.spans.numpy()[:, 0].astype(np.int32)
        return found

    def select(self, indices: np.ndarray) -> Pieces:
        """Those of the sequences ``indices``."""
        if self._is_one_each:
            chosen = indices
        else:
            counts, firsts = self.counts[indices], self._firsts[indices]
            chosen = np.arange(counts.sum()) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        return Pieces(self.arrays, None if self._placed is None else self._placed[0][chosen], chosen)


def _addresses(arrays: Sequence[np.ndarray], shared: SharedArrays) -> tuple[np.ndarray, Any]:
    """([arrays, 6] int64, what has to stay there): those that others cannot map are put into ``shared``, each once."""
    different = {id(array): array for array in arrays}  # many responses have one prompt
    found = [address_of(array) if array.nbytes else None for array in different.values()]
    table = np.array([(0,) * 6 if one is None else (one.pid, one.fd, *one.place) for one in found], np.int64).reshape(-1, 6)
    lacking = [array for array, address in zip(different.values(), found, strict=True) if address is None]
    table[[address is None for address in found]], kept = _put(lacking, shared)
    number_of = dict(zip(different, range(len(different)), strict=True))
    return table[[number_of[id(array)] for array in arrays]], kept


def _put(arrays: Sequence[np.ndarray], shared: SharedArrays) -> tuple[np.ndarray, Any]:
    """The same of arrays without addresses."""
    sizes, table = np.array([array.nbytes for array in arrays], np.int64), np.zeros((len(arrays), 6), np.int64)
    if not sizes.any():
        return table, None
    together = shared.put_together([np.ascontiguousarray(array) for array in arrays])
    there = address_of(together)
    assert there is not None  # it has been put there
    pid, fd, (start, extent_bytes, offset, _) = there
    table[sizes > 0] = pid, fd, start, extent_bytes, offset, 0
    table[:, 4] += (np.cumsum(sizes) - sizes) * (sizes > 0)
    table[:, 5] = sizes
    return table, together


class _Sequences(NamedTuple):
    """Those of a batch, as the ledger knows them."""

    of: tuple[Any, Any]
    """What they are found by: as long as this refers to it, no other object has its id."""
    keys: Sequence[Hashable]
    numbers: np.ndarray
    lengths: list[int]


class CacheDirectory:
    """The driver's account of one layout, for one step."""

    def __init__(self, num_replicas: int, shared: SharedArrays | None = None) -> None:
        """``shared``: for what ranks of this machine are to map; None: there are no others."""
        self._shared = shared
        self.homes: dict[Hashable, int] = {}
        """Sequence -> the replica that works on it, where that is settled."""
        self.routes: dict[str, int] = {}
        """By engine: the column of the experts that its updates follow, where the ranks alone have it."""
        self._numbers: dict[Hashable, int] = {}
        self._sequences: dict[int, _Sequences] = {}
        self._num_replicas = num_replicas
        self._columns: list[_Column] = []
        self._images = ImageDirectory(num_replicas)
        self._addressed: dict[int, tuple[np.ndarray, np.ndarray, Any]] = {}
        """By its id: an array, the numbers of its address, and what has to stay there."""
        self._tokens: dict[int, tuple[Any, _Rows]] = {}
        self._held = self._new_column(None)
        """Of tokens."""

    def keys(self, batch: PackedBatch) -> tuple[Sequence[Hashable], list[int]]:
        """(what names its sequences, their lengths). Responses only grow: with its length, an id says all tokens."""
        found = self._sequences.get(id(batch.cu_seqlens))
        if found is None or found.of[1] is not batch.ids:
            lengths = batch.lengths.tolist()
            keys = list(zip(batch.ids, lengths, strict=True)) if batch.ids else range(len(lengths))
            found = self._note(batch, keys, lengths)
        return found.keys, found.lengths

    def column(self, values: Tensor | Parts | None = None) -> int:
        """The number of a column: of the one that ``values`` are, or of a new one."""
        for number, column in enumerate(self._columns):
            if values is not None and column.values is values:
                return number
        self._columns.append(self._new_column(values))
        return len(self._columns) - 1

    def answered(self, column: int, keys: Sequence[Hashable], plan: Plan, values: Tensor | None = None) -> None:
        """The ranks keep their answers to a call as ``column``; ``values``: what the driver got of them."""
        found = self._columns[column]
        found.values, found.heard[:] = values, True
        for replica, microbatches in enumerate(plan):
            numbers = [self._numbers[keys[index]] for indices in microbatches for index in indices]
            self._with_room(found).has[replica, numbers] = True

    def payloads(self, batch: PackedBatch, keys: Sequence[Hashable], plan: Plan, columns: Sequence[int]) -> list[Payload]:
        """By replica: its micro-batches, and what it lacks for them. ``keys``: what names the batch's sequences.

        Of a column that a replica has not heard of it gets all rows of sequences that are at home there: other calls of the step
        will be about them.
        """
        sequences = self._sequences.get(id(batch.cu_seqlens))
        if sequences is None or sequences.keys is not keys:
            sequences = self._note(batch, keys, batch.lengths.tolist())
        rows = [np.array([index for indices in of for index in indices], np.int64) for of in plan]
        there: list[np.ndarray] | None = None
        payloads: list[Any] = [self._sequences_of(batch, sequences, replica, own, plan[replica]) for replica, own in enumerate(rows)]
        for number in columns:
            column = self._with_room(self._columns[number])
            if column.values is None:
                continue
            for replica, own in enumerate(rows):
                if not column.heard[replica]:
                    there = self._at_home(sequences) if there is None else there
                    own = np.union1d(own, there[replica])
                elif column.has[replica, sequences.numbers[own]].all():
                    continue
                payloads[replica] |= self._column(number, column, replica, own, batch, sequences.numbers)
        return payloads

    def _sequences_of(
        self, batch: PackedBatch, sequences: _Sequences, replica: int, rows: np.ndarray, plan: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        held, numbers = self._with_room(self._held).has[replica], sequences.numbers[rows]
        payload: dict[str, Any] = {
            "microbatch_sizes": np.array([len(indices) for indices in plan], np.int32),
            "sequences": numbers.astype(np.int32),
        }
        if batch.spans is not None:
            payload["spans"] = batch.spans.numpy()[rows].astype(np.int32)
        lacking = ~held[numbers]
        if lacking.any():
            new, held[numbers] = rows[lacking], True
            tokens = self._tokens_of(batch)
            payload |= {"new": numbers[lacking], "counts": tokens.counts[new], "tokens": tokens.select(new)}
        else:
            new = rows[:0]
        if batch.images is not None:
            payload |= self._images.payload(batch.images, new.tolist(), replica, self._pieces)
        return payload

    def _column(
        self, number: int, column: _Column, replica: int, rows: np.ndarray, batch: PackedBatch, numbers: np.ndarray
    ) -> dict[str, Any]:
        assert column.values is not None
        if column.rows is None:
            column.rows = _Rows.of(column.values, batch, self._shared)
        lacking = rows[~column.has[replica, numbers[rows]]]
        column.heard[replica], column.has[replica, numbers[lacking]] = True, True
        payload: dict[str, Any] = {
            f"of/{number}": numbers[lacking],
            f"column/{number}": column.rows.select(lacking),
            f"like/{number}": column.rows.nothing,
        }
        if isinstance(column.values, Parts):
            payload[f"counts/{number}"] = column.rows.counts[lacking]
        elif column.rows.starts is not None:
            payload[f"firsts/{number}"] = column.rows.starts[lacking]
        return payload

    def _pieces(self, arrays: Sequence[np.ndarray]) -> Pieces:
        """Of these, of which many are in other payloads too."""
        if self._shared is None or not arrays:
            return Pieces(arrays)
        new = [array for array in arrays if id(array) not in self._addressed]
        addresses, kept = _addresses(new, self._shared)
        self._addressed |= {id(array): (array, address, kept) for array, address in zip(new, addresses, strict=True)}
        return Pieces(arrays, np.array([self._addressed[id(array)][1] for array in arrays]))

    def _tokens_of(self, batch: PackedBatch) -> _Rows:
        known, rows = self._tokens.get(id(batch.cu_seqlens), (None, None))
        if rows is None or known is not batch.cu_seqlens:
            if TOKENS in batch.parts:
                rows = _Rows.of(batch.parts[TOKENS], batch, self._shared)
            else:
                # Ids of any vocabulary fit half the bytes.
                arrays = [part.numpy() for part in batch.tokens.to(torch.int32).split(batch.lengths.tolist())]
                rows = _Rows(arrays, np.ones(len(arrays), np.int64), np.zeros(0, np.int32))
            self._tokens[id(batch.cu_seqlens)] = batch.cu_seqlens, rows
        return rows

    def _note(self, batch: PackedBatch, keys: Sequence[Hashable], lengths: list[int]) -> _Sequences:
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        noted = _Sequences((batch.cu_seqlens, batch.ids), keys, np.array(numbers, np.int64), lengths)
        self._sequences[id(batch.cu_seqlens)] = noted
        return noted

    def _at_home(self, sequences: _Sequences) -> list[np.ndarray]:
        """By replica, rows of the batch; none where it is not settled."""
        homes = np.array([self.homes.get(key, -1) for key in sequences.keys])
        return [np.flatnonzero(homes == replica) for replica in range(self._num_replicas)]

    def _new_column(self, values: Tensor | Parts | None) -> _Column:
        return _Column(values, np.zeros((self._num_replicas, len(self._numbers)), bool), np.zeros(self._num_replicas, bool))

    def _with_room(self, column: _Column) -> _Column:
        missing = len(self._numbers) - column.has.shape[1]
        if missing:
            column.has = np.pad(column.has, ((0, 0), (0, missing)))
        return column


@dataclass(frozen=True)
class About:
    """The batch of a call, as the ledger of its layout knows it."""

    engine: str
    batch: PackedBatch
    lengths: list[int]
    step: int | None
    """None: of no step, nothing of it is kept."""
    ledger: CacheDirectory
    keys: Sequence[Any]
    """What names its sequences."""


class _Held(NamedTuple):
    """Rows of one sequence."""

    first: int
    """The token that the first one is of; tokens before it and behind the last one have 0."""
    arrays: Sequence[np.ndarray]


@dataclass
class _HeldColumn:
    nothing: np.ndarray
    """No row of it."""
    rows: dict[int, _Held] = field(default_factory=dict)
    """By the sequences' numbers."""


class SequenceCache:
    """Sequences on this rank, by their numbers, on the CPU."""

    def __init__(self, cut: Cut = lambda number, file: None) -> None:
        """``cut``: begins to cut those images that are this rank's to cut."""
        self._tokens: dict[int, Sequence[np.ndarray]] = {}
        self._lengths: dict[int, int] = {}
        self.images = ImageCache(cut)
        self._columns: dict[int, _HeldColumn] = {}

    def take(self, payload: Mapping[str, Any], fields: Mapping[str, int]) -> "RankBatch":
        """This rank's micro-batches of a call, whose ``fields`` are columns; what is new of them stays here."""
        new: list[int] = []
        if "new" in payload:
            new = payload["new"].tolist()
            self._tokens |= dict(zip(new, _grouped(payload["tokens"], payload["counts"]), strict=True))
            self._lengths |= {number: sum(map(len, self._tokens[number])) for number in new}
        has_images = "images" in payload
        if has_images:
            self.images.take(payload, new)
        for name, values in payload.items():
            if name.startswith("column/"):
                self._add(payload, int(name.removeprefix("column/")), values)
        ends = np.cumsum(payload["microbatch_sizes"])
        plan = [part.tolist() for part in np.split(payload["sequences"], ends[:-1])] if len(ends) else []
        spans = np.split(payload["spans"], ends[:-1]) if "spans" in payload else [None] * len(plan)
        microbatches = [self._microbatch(numbers, of, fields, has_images) for numbers, of in zip(plan, spans, strict=False)]
        return RankBatch(microbatches, plan, self)

    def keep(self, column: int, plan: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> None:
        """``parts`` of micro-batches as a column; ranks before the last stage have none."""
        for numbers, values in zip(plan, parts, strict=False):
            rows = values.cpu().split([self._lengths[number] for number in numbers])
            held = self._columns.setdefault(column, _HeldColumn(values[:0].cpu().numpy()))
            held.rows |= {number: _Held(0, [row.numpy()]) for number, row in zip(numbers, rows, strict=False)}

    def _add(self, payload: Mapping[str, Any], column: int, arrays: Sequence[np.ndarray]) -> None:
        numbers = payload[f"of/{column}"].tolist()
        counts, firsts = payload.get(f"counts/{column}"), payload.get(f"firsts/{column}")
        groups = [(array,) for array in arrays] if counts is None else _grouped(arrays, counts)
        starts = [0] * len(numbers) if firsts is None else firsts.tolist()
        held = self._columns.setdefault(column, _HeldColumn(payload[f"like/{column}"]))
        held.rows |= dict(zip(numbers, map(_Held, starts, groups), strict=True))

    def _microbatch(
        self, numbers: Sequence[int], spans: np.ndarray | None, fields: Mapping[str, int], has_images: bool
    ) -> PackedBatch:
        lengths = [self._lengths[number] for number in numbers]
        # Answers are where they were computed: on the last stage, which alone reads them.
        columns = {name: self._columns[column] for name, column in fields.items() if column in self._columns}
        columns = {name: column for name, column in columns.items() if column.rows.keys() >= set(numbers)}
        tokens = np.empty(sum(lengths), np.int64)
        if numbers:
            np.concatenate([array for number in numbers for array in self._tokens[number]], out=tokens)
        # Rows of many numbers, routes, are put together when it is their turn: together they would take more than the rest.
        wide = {name: column for name, column in columns.items() if column.nothing.ndim > 1}
        return PackedBatch(
            tokens=torch.from_numpy(tokens),
            cu_seqlens=cu_seqlens_of(torch.tensor(lengths, dtype=torch.int64)),
            fields={name: _field(column, numbers, lengths) for name, column in columns.items() if name not in wide},
            images=self.images.of(numbers) if has_images else None,
            parts={name: Parts([column.rows[n].arrays for n in numbers], column.nothing) for name, column in wide.items()},
            spans=None if spans is None else torch.from_numpy(spans.astype(np.int64)),
        )


class CachesByStep:
    """Sequences on this rank, by layout and step."""

    def __init__(self, cutting: ImagePatcher) -> None:
        self._cutting = cutting
        self._held: dict[tuple[int, int], SequenceCache] = {}

    def of(self, place: Topology, parallel: ParallelConfig, step: int | None) -> SequenceCache:
        """``step`` None: of no step, nothing of it is kept."""
        if step is None:
            return SequenceCache(self._cutting.share_of(place, parallel))
        if (place.layout, step) not in self._held:
            self._held[place.layout, step] = SequenceCache(self._cutting.share_of(place, parallel))
        return self._held[place.layout, step]

    def release(self, step: int | None) -> None:
        """Forget the sequences of ``step``; None: of every step."""
        for key in [key for key in self._held if step in (None, key[1])]:
            self._held.pop(key).images.drop()


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of the batch of a call."""

    microbatches: list[PackedBatch] = field(default_factory=list)
    plan: list[list[int]] = field(default_factory=list)
    """By micro-batch, the numbers of its sequences."""
    held: SequenceCache = field(default_factory=SequenceCache)

    def keep(self, column: int, parts: Sequence[Tensor]) -> None:
        """Answers, one tensor [tokens, ...] per micro-batch, stay here as a column."""
        self.held.keep(column, self.plan, parts)


def _field(column: _HeldColumn, numbers: Sequence[int], lengths: Iterable[int]) -> Tensor:
    """[T] of the sequences ``numbers``."""
    values, start = np.zeros(sum(lengths), column.nothing.dtype), 0
    for number, length in zip(numbers, lengths, strict=True):
        first, arrays = column.rows[number]
        first += start
        for array in arrays:
            values[first : first + len(array)] = array
            first += len(array)
        start += length
    return torch.from_numpy(values)


def _grouped(arrays: Sequence[np.ndarray], counts: np.ndarray) -> list[Sequence[np.ndarray]]:
    """``counts``: how many of them belong together."""
    ends = np.cumsum(counts)
    return [arrays[first:end] for first, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)]
