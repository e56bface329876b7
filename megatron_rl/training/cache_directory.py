"""The driver's directory of the ranks' caches: which replica has which sequences and columns of a step. No collectives.

A sequence's tokens are sent once to a replica that works on it, and each *column*, the rows of one field, likewise. A call
names sequences and columns by numbers. Columns are known by the driver's objects: a column that was sent, or that ranks
computed and kept, is not sent again as long as it is this very tensor or ``Rows``. So neither is changed in place.

Rows are sent as addresses (``data/rows.py``) to ranks that can map them, and ranks read them when a micro-batch needs them. So
the directory keeps all rows, unchanged, until the step is released: by then each rank has read the last of them, since its
answer to the step's last call depends on it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.batch import TOKENS, PackedBatch
from megatron_rl.data.rows import Rows
from megatron_rl.parallel.collectives import Payload
from megatron_rl.system.files.shared_file import SharedArrays
from megatron_rl.training.batching import Plan
from megatron_rl.training.image_cache import ImageDirectory
from megatron_rl.training.microbatch_io import reply_spans


@dataclass
class _Column:
    values: Tensor | Rows | None
    """The driver's values; None: the ranks alone have them."""
    has: np.ndarray
    """[replicas, sequences] bool, by number: True if the replica has the sequence's rows."""
    is_known: np.ndarray
    """[replicas] bool: True if the replica has any rows of the column."""
    rows: Rows | None = None
    """``values`` as they are sent."""


class _Sequences(NamedTuple):
    """The sequences of a batch, as the directory knows them."""

    of: tuple[Any, Any]
    """The batch's borders and ids: as long as this refers to them, no other object has their Python id."""
    keys: Sequence[Hashable]
    numbers: np.ndarray
    lengths: list[int]


class CacheDirectory:
    """The directory of one layout, for one step."""

    def __init__(self, num_replicas: int, shared: SharedArrays | None = None) -> None:
        """``shared``: where to put rows that other ranks of this machine are to map; None: there are no other ranks."""
        self._shared = shared
        self.assigned: dict[Hashable, int] = {}
        """Sequence -> its assigned replica."""
        self.routes: dict[str, int] = {}
        """Engine -> the column of the experts that its updates follow, where the ranks alone have it."""
        self._numbers: dict[Hashable, int] = {}
        self._sequences: dict[int, _Sequences] = {}
        self._num_replicas = num_replicas
        self._columns: list[_Column] = []
        self._images = ImageDirectory(num_replicas, shared)
        self._tokens: dict[int, tuple[Any, Rows]] = {}
        """Python id of a batch's borders -> the borders, and the batch's tokens."""
        self._has_tokens = self._new_column(None)

    def keys(self, batch: PackedBatch) -> tuple[Sequence[Hashable], list[int]]:
        """(names of its sequences, their lengths). Responses only grow, so an id with its length stands for all tokens."""
        found = self._sequences.get(id(batch.cu_seqlens))
        if found is None or found.of[1] is not batch.ids:
            lengths = batch.lengths.tolist()
            keys = list(zip(batch.ids, lengths, strict=True)) if batch.ids else range(len(lengths))
            found = self._note(batch, keys, lengths)
        return found.keys, found.lengths

    def column(self, values: Tensor | Rows | None = None) -> int:
        """The number of the column with these ``values``, or of a new one."""
        for number, column in enumerate(self._columns):
            if values is not None and column.values is values:
                return number
        self._columns.append(self._new_column(values))
        return len(self._columns) - 1

    def answered(self, column: int, keys: Sequence[Hashable], plan: Plan, values: Tensor | None = None) -> None:
        """The ranks keep their answers to a call as ``column``; ``values``: the driver's copy of them, where it has one."""
        found = self._columns[column]
        found.values, found.is_known[:] = values, True
        for replica, microbatches in enumerate(plan):
            numbers = [self._numbers[keys[index]] for indices in microbatches for index in indices]
            self._with_room(found).has[replica, numbers] = True

    def payloads(self, batch: PackedBatch, keys: Sequence[Hashable], plan: Plan, columns: Sequence[int]) -> list[Payload]:
        """The micro-batches of each replica, and the rows that it lacks for them. ``keys``: the names of the batch's sequences.

        A replica that has no rows of a column gets those of all sequences that are assigned to it: other calls of the step
        will work on them.
        """
        sequences = self._sequences.get(id(batch.cu_seqlens))
        if sequences is None or sequences.keys is not keys:
            sequences = self._note(batch, keys, batch.lengths.tolist())
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
        self, batch: PackedBatch, sequences: _Sequences, replica: int, rows: np.ndarray, plan: Sequence[Sequence[int]]
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
        self, number: int, column: _Column, replica: int, rows: np.ndarray, batch: PackedBatch, numbers: np.ndarray
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

    def _note(self, batch: PackedBatch, keys: Sequence[Hashable], lengths: list[int]) -> _Sequences:
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        noted = _Sequences((batch.cu_seqlens, batch.ids), keys, np.array(numbers, np.int64), lengths)
        self._sequences[id(batch.cu_seqlens)] = noted
        return noted

    def _assigned_rows(self, sequences: _Sequences) -> list[np.ndarray]:
        """For each replica, the rows of the batch whose sequences are assigned to it."""
        assigned = np.array([self.assigned.get(key, -1) for key in sequences.keys])
        return [np.flatnonzero(assigned == replica) for replica in range(self._num_replicas)]

    def _new_column(self, values: Tensor | Rows | None) -> _Column:
        return _Column(values, np.zeros((self._num_replicas, len(self._numbers)), bool), np.zeros(self._num_replicas, bool))

    def _with_room(self, column: _Column) -> _Column:
        missing = len(self._numbers) - column.has.shape[1]
        if missing:
            column.has = np.pad(column.has, ((0, 0), (0, missing)))
        return column


@dataclass(frozen=True)
class BatchOnReplicas:
    """The batch of a call, as the directory of its layout knows it."""

    engine: str
    batch: PackedBatch
    lengths: list[int]
    step: int | None
    """The batch's step; None: it belongs to no step, and the ranks cache nothing of it."""
    directory: CacheDirectory
    keys: Sequence[Any]
    """The names of its sequences."""
