"""Rows: a ragged column, stored as a table of addresses. A row has the values of one token, or a byte of an image file.

The rows of a sequence are in pieces: in this process's memory, in a file that other processes map
(``system/files/shared_file.py``), or on another node. Selecting and sending use only the table; ``packed`` reads
the rows.

Invariants: rows are immutable. Lengths come from the table, never from memory. ``owners`` keep the memory alive in
the process that made the rows. In a message, memory that others can map is sent as its address, and other memory as
its bytes. A sender of addresses keeps the rows until the receiver has read them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from megatron_rl.system.files.shared_file import NODE, MappedFile, SharedArrays, files_of, map_file


class FileId(NamedTuple):
    """A file of a received message that is not mapped yet."""

    pid: int
    """Process and node, as in an address."""
    fd: int


Memory = np.ndarray | MappedFile | FileId
"""Memory of pieces: [bytes] uint8 of this process, or a file."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of N sequences."""

    files: Sequence[Memory]
    table: np.ndarray
    """[pieces, 3] int64: index in ``files``, first byte there, number of rows; the pieces of a sequence are adjacent."""
    borders: np.ndarray
    """[N+1] int64: the first piece of each sequence."""
    like: np.ndarray
    """[0, ...] empty array with the dtype and shape of a row."""
    starts: np.ndarray | None = None
    """[N] int64: tokens of each sequence before its first row; None: 0."""
    owners: Any = None

    @classmethod
    def of(cls, by_sequence: Sequence[Sequence[np.ndarray]], like: np.ndarray | None = None) -> Self:
        """Rows of each sequence's arrays [n, ...], contiguous and of one dtype. ``like`` None: some sequence has an array."""
        if not by_sequence and like is not None:
            return cls([], np.zeros((0, 3), np.int64), np.zeros(1, np.int64), like)
        pieces = [[array for array in arrays if len(array)] for arrays in by_sequence]
        arrays = [array for of_sequence in pieces for array in of_sequence]
        if like is None:
            like = next(array for arrays_ in by_sequence for array in arrays_)[:0]
        files, number, first = files_of(arrays)
        # By identity, because many responses share the array of one prompt.
        own = {id(arrays[index]): arrays[index] for index in np.flatnonzero(number < 0).tolist()}
        number_of = {key: len(files) + place for place, key in enumerate(own)}
        for index in np.flatnonzero(number < 0).tolist():
            number[index], first[index] = number_of[id(arrays[index])], 0
        memory = [*files, *(array.reshape(-1).view(np.uint8) for array in own.values())]
        table = np.stack([number, first, np.fromiter(map(len, arrays), np.int64, len(arrays))], 1)
        return cls(memory, table, _borders(np.fromiter(map(len, pieces), np.int64, len(pieces))), like.copy(), None, arrays)

    @classmethod
    def flat(cls, values: np.ndarray, firsts: np.ndarray, ends: np.ndarray, starts: np.ndarray | None = None) -> Self:
        """The rows ``firsts`` [N] to ``ends`` [N] of ``values`` [T, ...], which no code may change from now on."""
        files, _, offset = files_of([values])
        memory: Memory = files[0] if files else values.reshape(-1).view(np.uint8)
        table = np.stack([np.zeros_like(firsts), firsts * _row_bytes(values) + (offset[0] if files else 0), ends - firsts], 1)
        return cls([memory], table, np.arange(len(firsts) + 1), values[:0].copy(), starts, values)

    @classmethod
    def concatenated(cls, columns: "Sequence[Rows]") -> "Rows":
        """The sequences of all ``columns`` (at least one), in order."""
        if len(columns) == 1:
            return columns[0]
        files = list({id(file): file for rows in columns for file in rows.files}.values())
        number_of = {id(file): number for number, file in enumerate(files)}
        tables, starts = [], [rows.starts for rows in columns]
        for rows in columns:
            tables.append(table := rows.table.copy())
            table[:, 0] = np.array([number_of[id(file)] for file in rows.files], np.int64)[table[:, 0]]
        counts = np.concatenate([np.diff(rows.borders) for rows in columns])
        found = None
        if any(one is not None for one in starts):
            found = np.concatenate([np.zeros(len(rows), np.int64) if rows.starts is None else rows.starts for rows in columns])
        owners = [rows.owners for rows in columns]
        return cls(files, np.concatenate(tables), _borders(counts), columns[0].like, found, owners)

    def __len__(self) -> int:
        return len(self.borders) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[N] number of rows of each sequence."""
        ends = _borders(self.table[:, 2])[self.borders]
        return ends[1:] - ends[:-1]

    @property
    def num_bytes(self) -> int:
        return int(self.table[:, 2].sum()) * _row_bytes(self.like)

    @property
    def nodes(self) -> np.ndarray:
        """[N] node of each sequence's first piece, -1 for a sequence without rows; this process's own memory counts as node 0."""
        of_file = np.array([0 if isinstance(file, np.ndarray) else file.pid // NODE for file in self.files], np.int64)
        found = np.full(len(self), -1)
        filled = self.borders[1:] > self.borders[:-1]
        found[filled] = of_file[self.table[self.borders[:-1][filled], 0]]
        return found

    @property
    def all_nodes(self) -> set[int]:
        """Nodes of all files with rows; this process's own memory belongs to no node."""
        used = [self.files[number] for number in set(self.table[:, 0].tolist())]
        return {file.pid // NODE for file in used if not isinstance(file, np.ndarray)}

    def select(self, indices: Sequence[int] | np.ndarray) -> "Rows":
        """The sequences ``indices`` in that order."""
        chosen = np.asarray(indices, np.int64)
        first = self.borders[chosen]
        borders = _borders(counts := self.borders[chosen + 1] - first)
        table = self.table[np.arange(borders[-1]) + np.repeat(first - borders[:-1], counts)]
        starts = None if self.starts is None else self.starts[chosen]
        return Rows(self.files, table, borders, self.like, starts, self.owners)

    def packed(self, lengths: np.ndarray | None = None, dtype: np.dtype | type | None = None) -> np.ndarray:
        """[T, ...] the sequences concatenated, as a new array.

        ``lengths`` [N]: tokens of each whole sequence; tokens without a row get 0. None: every token has a row.
        """
        pieces = self._pieces()
        if lengths is None:
            out = np.empty((int(self.table[:, 2].sum()), *self.like.shape[1:]), dtype or self.like.dtype)
            return np.concatenate(pieces, out=out) if pieces else out
        own = self.lengths
        if (own == lengths).all():
            return self.packed(None, dtype)
        ends, shape = np.cumsum(lengths), (int(lengths.sum()), *self.like.shape[1:])
        begin = ends - lengths
        if self.starts is None:
            # Zeros only where rows are missing: of routes, which take gigabytes, few rows are.
            out = np.empty(shape, dtype or self.like.dtype)
            for first, end in zip((begin + own).tolist(), ends.tolist(), strict=True):
                out[first:end] = 0
        else:
            begin += self.starts
            out = np.zeros(shape, dtype or self.like.dtype)
        of_piece = np.repeat(begin - (np.cumsum(own) - own), np.diff(self.borders))
        firsts = of_piece + np.cumsum(self.table[:, 2]) - self.table[:, 2]
        for piece, first in zip(pieces, firsts.tolist(), strict=True):
            out[first : first + len(piece)] = piece
        return out

    def shared(self, arrays: SharedArrays) -> "Rows":
        """These rows in files that other processes can map; rows in this process's own memory are copied."""
        own, gathered, first = self._own_pieces()
        if not len(own):
            return self
        there = arrays.put_together(gathered)
        (file,), _, offset = files_of([there])
        kept = [number for number, one in enumerate(self.files) if isinstance(one, MappedFile)]
        numbers = np.full(len(self.files), len(kept))
        numbers[kept] = np.arange(len(kept))
        table = self.table.copy()
        table[:, 0], table[own, 1] = numbers[table[:, 0]], offset[0] + first
        files = [*(self.files[number] for number in kept), file]
        return replace(self, files=files, table=table, owners=(self.owners, there))

    def mapped(self, open_file: Callable[[int, int], MappedFile] = map_file) -> "Rows":
        """These rows with the files of a message mapped. Raises OSError for a file that this process cannot map."""
        files = [open_file(*file) if isinstance(file, FileId) else file for file in self.files]
        return replace(self, files=files)

    def fetched(self, read: Callable[[int, np.ndarray], np.ndarray]) -> "Rows":
        """These rows in this process's own memory. ``read(node, addresses [k, 4])`` returns the bytes of one node's arrays."""
        table, sizes = self.table.copy(), self.table[:, 2] * _row_bytes(self.like)
        of_piece = np.array([-1 if isinstance(file, np.ndarray) else file.pid // NODE for file in self.files], np.int64)[table[:, 0]]
        files: list[Memory] = list(self.files)
        for node in np.unique(of_piece[of_piece >= 0]).tolist():
            chosen = np.flatnonzero(of_piece == node)
            ids = np.array([(0, 0) if isinstance(file, np.ndarray) else (file.pid, file.fd) for file in self.files], np.int64)
            addresses = np.concatenate([ids[table[chosen, 0]], table[chosen, 1:2], sizes[chosen, None]], 1)
            table[chosen, 0], table[chosen, 1] = len(files), np.cumsum(sizes[chosen]) - sizes[chosen]
            files.append(read(node, addresses))
        return replace(self, files=files, table=table, owners=None)

    def __reduce__(self) -> tuple[Any, ...]:
        own, gathered, first_own = self._own_pieces()
        table = self.table.copy()
        if len(own):
            table[own, 0], table[own, 1] = len(self.files), first_own
        used = sorted(set(table[:, 0].tolist()))
        number = np.searchsorted(used, table[:, 0])
        files: list[Any] = [self.files[index] if index < len(self.files) else np.concatenate(gathered) for index in used]
        ids = [file if isinstance(file, np.ndarray) else FileId(file.pid, file.fd) for file in files]
        starts = None if self.starts is None else self.starts.astype(np.int32)
        columns = number.astype(np.int16), table[:, 1], table[:, 2].astype(np.int32), self.borders.astype(np.int32)
        return _received, (ids, *columns, self.like, starts)

    def _own_pieces(self) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """Pieces in this process's own memory: (their indices, the bytes of each distinct piece, each index's offset in these bytes)."""
        is_own = [isinstance(file, np.ndarray) for file in self.files]
        if not any(is_own):
            return np.zeros(0, np.int64), [], np.zeros(0, np.int64)
        own = np.flatnonzero(np.array(is_own)[self.table[:, 0]])
        keys = list(map(tuple, self.table[own].tolist()))
        firsts, gathered, end, row_bytes = dict[tuple[int, ...], int](), list[np.ndarray](), 0, _row_bytes(self.like)
        for key in keys:
            if key not in firsts:
                file, first, num_rows = key
                raw: Any = self.files[file]
                gathered.append(raw[first : first + num_rows * row_bytes])
                firsts[key], end = end, end + num_rows * row_bytes
        return own, gathered, np.array([firsts[key] for key in keys], np.int64)

    def _pieces(self) -> list[np.ndarray]:
        """Each piece [rows, ...], as a view."""
        if not len(self.table):
            return []
        memory = [file.raw if isinstance(file, MappedFile) else file for file in self.files]
        dtype, shape = self.like.dtype, self.like.shape[1:]
        numbers = math.prod(shape)
        views = [np.frombuffer(memory[file], dtype, rows * numbers, first) for file, first, rows in self.table.tolist()]
        return [view.reshape(-1, *shape) for view in views] if shape else views


def _received(files: list[Any], number: np.ndarray, first: np.ndarray, rows: np.ndarray, borders: np.ndarray, *more: Any) -> Rows:
    like, starts = more
    ids = [FileId(*file) if isinstance(file, tuple) else file for file in files]
    table = np.stack([number.astype(np.int64), first, rows.astype(np.int64)], 1)
    return Rows(ids, table, borders.astype(np.int64), like, None if starts is None else starts.astype(np.int64))


def _row_bytes(like: np.ndarray) -> int:
    return like.dtype.itemsize * math.prod(like.shape[1:])


def _borders(counts: np.ndarray) -> np.ndarray:
    """[N] counts -> [N+1] int64 starts; the last entry is the total."""
    found = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found
