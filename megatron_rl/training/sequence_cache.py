"""Caches each step's sequences on the ranks, and the driver's directory of these caches. No collectives.

A replica gets a sequence's tokens once, and likewise the rows of each *column* (a field). Calls name sequences and
columns by numbers. The driver identifies a column by its object: a column that was sent, or that the ranks computed
and kept, is not sent again while it is the same tensor or ``Rows``, so neither may be changed in place.

Rows are sent as addresses (``data/rows.py``) to ranks that can map them; a rank reads them when a micro-batch needs
them. So the directory keeps all rows, unchanged, until the step is released. By then every rank has read all rows,
because the result of the step's last call depends on them.

All ranks of a replica have the same sequences; columns that ranks compute themselves are only on the replica's last
pipeline stage, which reads them.
"""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.batch import TOKENS, PackedBatch, reply_spans
from megatron_rl.data.rows import Rows
from megatron_rl.parallel.collectives import Payload
from megatron_rl.system.files.shared_file import SharedArrays
from megatron_rl.training.batching import Plan
from megatron_rl.training.image_cache import Cut, ImageCache, ImageDirectory


@dataclass
class _SentColumn:
    values: Tensor | Rows | None
    """The driver's values; None: the ranks alone have them."""
    has: np.ndarray
    """[replicas, sequences] bool, by number: True if the replica has the sequence's rows."""
    is_known: np.ndarray
    """[replicas] bool: True if the replica has any rows of the column."""
    rows: Rows | None = None
    """``values`` as they are sent."""


class BatchSequences(NamedTuple):
    """The sequences of a batch, as the directory knows them."""

    borders: Tensor
    """``borders`` and ``ids`` are the batch's own objects: while they are referenced here, no other object has their Python id."""
    ids: tuple[int, ...]
    keys: Sequence[Hashable]
    """Names of the sequences. Responses only grow, so an id with a length stands for all tokens."""
    numbers: np.ndarray
    lengths: list[int]


class CacheDirectory:
    """The directory of one layout, for one step."""

    def __init__(self, num_replicas: int, shared: SharedArrays | None = None, *, step: int | None = None) -> None:
        """``shared``: where to put rows that other ranks of this machine are to map; None: there are no other ranks.

        ``step`` None: the directory is for one call, and the ranks cache nothing of it.
        """
        self.step = step
        self._shared = shared
        self.assigned: dict[Hashable, int] = {}
        """Maps each sequence to its assigned replica."""
        self.routes: dict[str, int] = {}
        """Engine -> the column of the experts that its updates follow, where the ranks alone have it."""
        self._numbers: dict[Hashable, int] = {}
        self._sequences: dict[int, BatchSequences] = {}
        self._num_replicas = num_replicas
        self._columns: list[_SentColumn] = []
        self._images = ImageDirectory(num_replicas, shared)
        self._tokens: dict[int, tuple[Any, Rows]] = {}
        """Python id of a batch's borders -> the borders, and the batch's tokens."""
        self._has_tokens = self._new_column(None)

    def sequences(self, batch: PackedBatch) -> BatchSequences:
        """The batch's sequences, which the same borders and ids name."""
        found = self._sequences.get(id(batch.cu_seqlens))
        if found is None or found.ids is not batch.ids:
            lengths = batch.lengths.tolist()
            keys = list(zip(batch.ids, lengths, strict=True)) if batch.ids else range(len(lengths))
            numbers = np.array([self._numbers.setdefault(key, len(self._numbers)) for key in keys], np.int64)
            found = BatchSequences(batch.cu_seqlens, batch.ids, keys, numbers, lengths)
            self._sequences[id(batch.cu_seqlens)] = found
        return found

    def column(self, values: Tensor | Rows | None = None) -> int:
        """The number of the column with these ``values``, or of a new one."""
        for number, column in enumerate(self._columns):
            if values is not None and column.values is values:
                return number
        self._columns.append(self._new_column(values))
        return len(self._columns) - 1

    def answered(self, column: int, batch: PackedBatch, plan: Plan, values: Tensor | None = None) -> None:
        """Note that the ranks keep the results of a call as ``column``; ``values``: the driver's copy, if it has one."""
        found, numbers = self._columns[column], self.sequences(batch).numbers
        found.values, found.is_known[:] = values, True
        for replica, microbatches in enumerate(plan):
            indices = [index for microbatch in microbatches for index in microbatch]
            self._with_room(found).has[replica, numbers[indices]] = True

    def payloads(self, batch: PackedBatch, plan: Plan, columns: Sequence[int]) -> list[Payload]:
        """The micro-batches of each replica, and the rows that it lacks for them.

        A replica that has no rows of a column gets those of all sequences that are assigned to it: other calls of
        the step will work on them.
        """
        sequences = self.sequences(batch)
        rows = [np.array([index for indices in of for index in indices], np.int64) for of in plan]
        assigned: list[np.ndarray] | None = None
        payloads: list[Any] = [self._sequences_of(batch, sequences, replica, own, plan[replica]) for replica, own in enumerate(rows)]
        for number in columns:
            column = self._with_room(self._columns[number])
            if column.values is None:
                continue
            for replica, own in enumerate(rows):
                if not column.is_known[replica]:
                    assigned = self._assigned_rows(sequences) if assigned is None else assigned
                    own = np.union1d(own, assigned[replica])
                elif column.has[replica, sequences.numbers[own]].all():
                    continue
                payloads[replica] |= self._column(number, column, replica, own, batch, sequences.numbers)
        return payloads

    def _sequences_of(
        self, batch: PackedBatch, sequences: BatchSequences, replica: int, rows: np.ndarray, plan: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        has, numbers = self._with_room(self._has_tokens).has[replica], sequences.numbers[rows]
        payload: dict[str, Any] = {
            "microbatch_sizes": np.array([len(indices) for indices in plan], np.int32),
            "sequences": numbers.astype(np.int32),
        }
        if batch.spans is not None:
            payload["spans"] = batch.spans.numpy()[rows].astype(np.int32)
        new = rows[~has[numbers]]
        if len(new):
            has[sequences.numbers[new]] = True
            payload |= {"new": sequences.numbers[new], TOKENS: self._tokens_of(batch).select(new)}
        if batch.images is not None:
            payload |= self._images.payload(batch.images, new.tolist(), replica)
        return payload

    def _column(
        self, number: int, column: _SentColumn, replica: int, rows: np.ndarray, batch: PackedBatch, numbers: np.ndarray
    ) -> dict[str, Any]:
        if column.rows is None:
            column.rows = self._sendable(column.values, batch)
        lacking = rows[~column.has[replica, numbers[rows]]]
        column.is_known[replica], column.has[replica, numbers[lacking]] = True, True
        return {f"of/{number}": numbers[lacking], f"column/{number}": column.rows.select(lacking)}

    def _sendable(self, values: Tensor | Rows | None, batch: PackedBatch) -> Rows:
        """Values of the batch's tokens, where the ranks of this machine can map them."""
        assert values is not None
        if isinstance(values, Tensor):
            batch = batch if values.dim() == 1 else replace(batch, spans=None)
            starts = None if batch.spans is None else batch.spans.numpy()[:, 0]
            values = Rows.flat(values.numpy(), *reply_spans(batch), starts)
        return values if self._shared is None else values.shared(self._shared)

    def _tokens_of(self, batch: PackedBatch) -> Rows:
        known, rows = self._tokens.get(id(batch.cu_seqlens), (None, None))
        if rows is None or known is not batch.cu_seqlens:
            # Ids of any vocabulary fit half the bytes.
            values = batch.parts[TOKENS] if TOKENS in batch.parts else batch.tokens.to(torch.int32)
            rows = self._sendable(values, replace(batch, spans=None))
            self._tokens[id(batch.cu_seqlens)] = batch.cu_seqlens, rows
        return rows

    def _assigned_rows(self, sequences: BatchSequences) -> list[np.ndarray]:
        """For each replica, the rows of the batch whose sequences are assigned to it."""
        assigned = np.array([self.assigned.get(key, -1) for key in sequences.keys])
        return [np.flatnonzero(assigned == replica) for replica in range(self._num_replicas)]

    def _new_column(self, values: Tensor | Rows | None) -> _SentColumn:
        return _SentColumn(values, np.zeros((self._num_replicas, len(self._numbers)), bool), np.zeros(self._num_replicas, bool))

    def _with_room(self, column: _SentColumn) -> _SentColumn:
        missing = len(self._numbers) - column.has.shape[1]
        if missing:
            column.has = np.pad(column.has, ((0, 0), (0, missing)))
        return column


# ------------------------------------------------------------------------------------------------------------ on the ranks


_CachedColumn = tuple[Rows, dict[int, int]]
"""Rows of sequences, and the index of each sequence in them by its number."""


def _with(column: _CachedColumn | None, numbers: Sequence[int], rows: Rows) -> _CachedColumn:
    """The column with the ``rows`` of further sequences."""
    present, indices = column or (None, {})
    first = len(present) if present else 0
    indices |= zip(numbers, range(first, first + len(numbers)), strict=True)
    return Rows.concatenated([present, rows]) if present else rows, indices


def _select(column: _CachedColumn, numbers: Sequence[int]) -> Rows:
    rows, indices = column
    return rows.select([indices[number] for number in numbers])


class SequenceCache:
    """Sequences on this rank, by their numbers, on the CPU."""

    def __init__(self, cut: Cut = lambda number, file: None) -> None:
        """``cut``: starts to cut the images of this rank's share into patches."""
        self._tokens: _CachedColumn = Rows.of([], np.zeros(0, np.int32)), {}
        self._columns: dict[int, _CachedColumn] = {}
        self.images = ImageCache(cut)

    def take(self, payload: Mapping[str, Any], fields: Mapping[str, int]) -> list[PackedBatch]:
        """This rank's micro-batches of a call, whose ``fields`` are columns; ``ids`` are the sequences' numbers.

        The payload's rows stay in the cache.
        """
        new: list[int] = payload["new"].tolist() if "new" in payload else []
        if new:
            self._tokens = _with(self._tokens, new, payload[TOKENS])
        if "images" in payload:
            self.images.take(payload, new)
        for name, rows in payload.items():
            if name.startswith("column/"):
                number = int(name.removeprefix("column/"))
                self._columns[number] = _with(self._columns.get(number), payload[f"of/{number}"].tolist(), rows)
        sizes = payload["microbatch_sizes"].tolist()
        numbers = payload["sequences"].tolist()
        images = self.images if "images" in payload else None
        return self._packed(numbers, sizes, payload.get("spans"), fields, images)

    def keep(self, column: int, microbatches: Sequence[PackedBatch], parts: Sequence[Tensor]) -> None:
        """Add results, one tensor [tokens, ...] per micro-batch, as a column; ranks before the last stage have no results."""
        if not parts:
            return
        by_microbatch = []
        for batch, values in zip(microbatches, parts, strict=False):
            borders = batch.cu_seqlens.numpy()
            by_microbatch.append(Rows.flat(values.cpu().numpy(), borders[:-1], borders[1:]))
        rows = Rows.concatenated(by_microbatch)
        numbers = [number for batch in microbatches[: len(parts)] for number in batch.ids]
        self._columns[column] = _with(self._columns.get(column), numbers, rows)

    def _packed(
        self, numbers: Sequence[int], sizes: Sequence[int], spans: np.ndarray | None, fields: Mapping[str, int], images: ImageCache | None
    ) -> list[PackedBatch]:
        """The sequences ``numbers`` as micro-batches of ``sizes`` sequences each."""
        if not sizes:
            return []
        rows = _select(self._tokens, numbers)
        lengths = rows.lengths
        borders = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        columns = {name: self._columns[column] for name, column in fields.items() if column in self._columns}
        wanted = set(numbers)
        # Before the last stage a column of results may have some of the sequences; no rank reads it there.
        columns = {name: column for name, column in columns.items() if column[1].keys() >= wanted}
        # Routes are packed when their micro-batch runs: those of all micro-batches would take more memory than the rest.
        wide = {name: column for name, column in columns.items() if column[0].like.ndim > 1}
        # One array for all micro-batches: packing each one alone costs ten small numpy calls per column.
        tokens = torch.from_numpy(rows.packed(dtype=np.int64))
        narrow = {name: _select(column, numbers).packed(lengths) for name, column in columns.items() if name not in wide}
        values = {name: torch.from_numpy(packed) for name, packed in narrow.items()}
        return [
            PackedBatch(
                tokens=tokens[borders[first] : borders[end]],
                cu_seqlens=torch.from_numpy(borders[first : end + 1] - borders[first]),
                fields={name: packed[borders[first] : borders[end]] for name, packed in values.items()},
                images=None if images is None else images.of(numbers[first:end]),
                ids=tuple(numbers[first:end]),
                parts={name: _select(column, numbers[first:end]) for name, column in wide.items()},
                spans=None if spans is None else torch.from_numpy(spans[first:end].astype(np.int64)),
            )
            for first, end in _ranges(sizes)
        ]


def _ranges(sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
    """(first, end) of consecutive groups of these sizes."""
    return itertools.pairwise(itertools.accumulate(sizes, initial=0))
