"""Caches each step's sequences on the ranks, and the driver's directory of these caches. No collectives.

A replica gets a sequence's tokens once, and likewise the rows of each *column* (a field). Calls name sequences and
columns by numbers. The driver identifies a column by its object: a column that was sent, or that the ranks computed
and kept, is not sent again while it is the same tensor or ``Rows``, so neither may be changed in place.

Rows are sent as addresses (``data/rows.py``) to ranks that can map them; a rank reads them when a micro-batch needs
them. So the directory keeps all rows, unchanged, until the step is released. By then every rank has read all rows,
because the result of the step's last call depends on them.

All ranks of a replica have the same sequences; columns that ranks compute themselves are only on the replica's last
pipeline stage, which reads them.

Images are files on the way to the ranks, and patches on the ranks. A replica gets the file of an image once, for any
number of its sequences, and cuts it into patches once: each rank with the encoder cuts its share, and the ranks exchange
patches when they distribute the encoding (``models/image_encoding.py``). Threads cut while the rank computes, in the order
of the sequences, which is that of the micro-batches: a micro-batch waits only for its own images.
"""

import itertools
import os
import pickle
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import TOKENS, Images, PackedBatch, reply_spans
from megatron_rl.data.images import ImageFile
from megatron_rl.data.rows import Rows
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.model_facts import takes_images
from megatron_rl.parallel.collectives import Payload
from megatron_rl.parallel.topology import Topology
from megatron_rl.system.files.shared_file import SharedArrays
from megatron_rl.training.batching import Plan

_MOST_THREADS = 4

Cut = Callable[[int, ImageFile], Future[Tensor] | None]
"""Function that starts to cut the image of a number; returns None if another rank cuts it."""
_CachedColumn = tuple[Rows, dict[int, int]]
"""Rows of sequences, and the index of each sequence in them by its number."""


class ImageDirectory:
    """The driver's directory of the images on the ranks of one layout, for one step."""

    def __init__(self, num_replicas: int, shared: SharedArrays | None) -> None:
        """``shared``: where to put files that other ranks of this machine are to map; None: there are no other ranks."""
        self._shared = shared
        self._files: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Python id of a file's bytes -> the bytes, and their copy that others can map."""
        self._numbers: dict[tuple[str, int], int] = {}
        """(digest, size) of an image -> its number."""
        self._held: list[set[int]] = [set() for _ in range(num_replicas)]

    def payload(self, images: Images, sequences: Sequence[int], replica: int) -> dict[str, Tensor | Rows]:
        """The images of those ``sequences`` of the batch that are new to the replica, for ``ImageCache.take``."""
        shown: list[list[int]] = []
        new: dict[int, ImageFile] = {}
        for sequence in sequences:
            files = [_file(images.sources[image]) for image in images.of(sequence)]
            shown.append([self._number(file) for file in files])
            new |= {number: file for number, file in zip(shown[-1], files, strict=True) if number not in self._held[replica]}
        self._held[replica].update(new)
        about = [(number, file.ref, len(file.data)) for number, file in new.items()]
        return {
            "images": torch.frombuffer(bytearray(pickle.dumps((shown, about))), dtype=torch.uint8),
            "image_files": Rows.of([[self._mappable(file.data)] for file in new.values()], np.zeros(0, np.uint8)),
        }

    def _mappable(self, data: np.ndarray) -> np.ndarray:
        """Put a file where others can map it, once for all replicas."""
        if self._shared is None:
            return data
        if id(data) not in self._files:
            self._files[id(data)] = data, self._shared.put(data)
        return self._files[id(data)][1]

    def _number(self, file: ImageFile) -> int:
        return self._numbers.setdefault((file.ref.digest, file.ref.max_tokens), len(self._numbers))


def _file(source: object) -> ImageFile:
    assert isinstance(source, ImageFile)  # as the driver's batches have them
    return source


class ImageCache:
    """The images of the sequences on this rank."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._patches: dict[int, Future[Tensor] | None] = {}
        self._grids: dict[int, tuple[int, int, int]] = {}
        self._shown: dict[int, list[int]] = {}
        """Sequence -> the numbers of its images."""

    def take(self, payload: Mapping[str, Any], new: Sequence[int]) -> None:
        """Add the images that ``ImageDirectory`` has sent for the sequences ``new``."""
        shown, about = pickle.loads(payload["images"].numpy().tobytes())
        for index, (number, ref, _) in enumerate(about):
            self._grids[number] = ref.grid
            # Packed into separate memory: threads may read the file after the driver has dropped it.
            self._patches[number] = self._cut(number, ImageFile(ref, payload["image_files"].select([index]).packed()))
        self._shown |= dict(zip(new, shown, strict=True))

    def of(self, sequences: Sequence[int]) -> Images:
        found = [self._shown[sequence] for sequence in sequences]
        numbers = [number for shown in found for number in shown]
        return Images(
            sources=[self._patches[number] for number in numbers],
            grids=torch.tensor([self._grids[number] for number in numbers], dtype=torch.int64).view(-1, 3),
            sequences=torch.repeat_interleave(torch.tensor([len(shown) for shown in found], dtype=torch.int64)),
        )

    def drop(self) -> None:
        """Cancel the images that are not cut yet."""
        for patches in self._patches.values():
            if patches is not None:
                patches.cancel()


class ImagePatcher:
    """Threads of this rank that cut images into patches for the model in the folder ``path``."""

    def __init__(self, path: str | Path, models: Sequence[ModelConfig] = ()) -> None:
        """Raises DataError if one of the rank's ``models`` takes images, but the folder has no image processor."""
        self._path = path
        if any(map(takes_images, models)):
            _ = self._vision

    @cached_property
    def _vision(self) -> ImageProcessor:
        return ImageProcessor(self._path)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return ThreadPoolExecutor(max(1, min(cores, _MOST_THREADS)), "images")

    def share_of(self, place: Topology, parallel: ParallelConfig) -> Cut:
        """Function that cuts this rank's share: the ranks with the same batch that share the encoding cut equal numbers of images."""
        # Without sequence parallelism every tensor-parallel peer encodes all of them (models/image_encoding.py).
        num_tensor_ranks, tensor_rank = (place.tp_size, place.tp_rank) if parallel.sequence_parallel else (1, 0)
        num_peers, own = num_tensor_ranks * place.cp_size, num_tensor_ranks * place.cp_rank + tensor_rank

        def cut(number: int, file: ImageFile) -> Future[Tensor] | None:
            if place.pp_rank > 0 or number % num_peers != own:
                return None
            return self._threads.submit(self._vision.patchify, file)

        return cut


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
