"""The cache of a rank: the sequences of a step and the columns that belong to them (``cache_directory.py``). No collectives.

Rows stay where they were made, and a micro-batch is packed when it is needed. A replica of several ranks has the same
sequences on each of them; the columns that ranks compute themselves are on the replica's last stage alone, which reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import TOKENS, PackedBatch, cu_seqlens_of
from megatron_rl.data.rows import Rows
from megatron_rl.parallel.topology import Topology
from megatron_rl.training.image_cache import Cut, ImageCache, ImagePatcher


class _CachedColumn:
    """Rows by the numbers of their sequences."""

    def __init__(self, like: np.ndarray) -> None:
        self.rows = Rows.of([], like)
        self._position: dict[int, int] = {}

    def add(self, numbers: Sequence[int], rows: Rows) -> None:
        first = len(self.rows)
        self.rows = Rows.concatenated([self.rows, rows]) if first else rows
        self._position |= zip(numbers, range(first, first + len(numbers)), strict=True)

    def has(self, numbers: Sequence[int]) -> bool:
        return all(number in self._position for number in numbers)

    def select(self, numbers: Sequence[int]) -> Rows:
        return self.rows.select([self._position[number] for number in numbers])


class SequenceCache:
    """Sequences on this rank, by their numbers, on the CPU."""

    def __init__(self, cut: Cut = lambda number, file: None) -> None:
        """``cut``: begins to cut those images that are this rank's to cut."""
        self._tokens = _CachedColumn(np.zeros(0, np.int32))
        self._columns: dict[int, _CachedColumn] = {}
        self.images = ImageCache(cut)

    def take(self, payload: Mapping[str, Any], fields: Mapping[str, int]) -> "RankBatch":
        """This rank's micro-batches of a call, whose ``fields`` are columns. The payload's rows stay in the cache."""
        new: list[int] = payload["new"].tolist() if "new" in payload else []
        if new:
            self._tokens.add(new, payload[TOKENS])
        has_images = "images" in payload
        if has_images:
            self.images.take(payload, new)
        for name, rows in payload.items():
            if name.startswith("column/"):
                number = int(name.removeprefix("column/"))
                if number not in self._columns:
                    self._columns[number] = _CachedColumn(rows.like)
                self._columns[number].add(payload[f"of/{number}"].tolist(), rows)
        ends = np.cumsum(payload["microbatch_sizes"])
        plan = [part.tolist() for part in np.split(payload["sequences"], ends[:-1])] if len(ends) else []
        spans = np.split(payload["spans"], ends[:-1]) if "spans" in payload else [None] * len(plan)
        microbatches = [self._microbatch(numbers, of, fields, has_images) for numbers, of in zip(plan, spans, strict=False)]
        return RankBatch(microbatches, plan, self)

    def keep(self, column: int, plan: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> None:
        """Add ``parts`` of micro-batches as a column; ranks before the last stage have no parts."""
        if not parts:
            return
        by_microbatch = []
        for numbers, values in zip(plan, parts, strict=False):
            ends = np.cumsum(lengths := self._tokens.select(numbers).lengths)
            by_microbatch.append(Rows.flat(values.cpu().numpy(), ends - lengths, ends))
        rows = Rows.concatenated(by_microbatch)
        cached = self._columns.setdefault(column, _CachedColumn(rows.like))
        cached.add([number for numbers in plan[: len(by_microbatch)] for number in numbers], rows)

    def _microbatch(
        self, numbers: Sequence[int], spans: np.ndarray | None, fields: Mapping[str, int], has_images: bool
    ) -> PackedBatch:
        tokens = self._tokens.select(numbers)
        lengths = tokens.lengths
        columns = {name: self._columns[column] for name, column in fields.items() if column in self._columns}
        columns = {name: column for name, column in columns.items() if column.has(numbers)}
        # Routes are packed when their micro-batch runs: those of all micro-batches would take more memory than the rest.
        wide = {name: column for name, column in columns.items() if column.rows.like.ndim > 1}
        narrow = {name: column.select(numbers).packed(lengths) for name, column in columns.items() if name not in wide}
        return PackedBatch(
            tokens=torch.from_numpy(tokens.packed(dtype=np.int64)),
            cu_seqlens=cu_seqlens_of(torch.from_numpy(lengths)),
            fields={name: torch.from_numpy(values) for name, values in narrow.items()},
            images=self.images.of(numbers) if has_images else None,
            parts={name: column.select(numbers) for name, column in wide.items()},
            spans=None if spans is None else torch.from_numpy(spans.astype(np.int64)),
        )


class CachesByStep:
    """The caches of this rank, by layout and step."""

    def __init__(self, patcher: ImagePatcher) -> None:
        self._patcher = patcher
        self._caches: dict[tuple[int, int], SequenceCache] = {}

    def of(self, place: Topology, parallel: ParallelConfig, step: int | None) -> SequenceCache:
        """The cache of a layout and a step; ``step`` None: an unshared one."""
        if step is None:
            return SequenceCache(self._patcher.share_of(place, parallel))
        if (place.layout, step) not in self._caches:
            self._caches[place.layout, step] = SequenceCache(self._patcher.share_of(place, parallel))
        return self._caches[place.layout, step]

    def release(self, step: int | None) -> None:
        """Drop the sequences of ``step``; None: of every step."""
        for key in [key for key in self._caches if step in (None, key[1])]:
            self._caches.pop(key).images.drop()


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of the batch of a call."""

    microbatches: list[PackedBatch] = field(default_factory=list)
    plan: list[list[int]] = field(default_factory=list)
    """The numbers of each micro-batch's sequences."""
    cache: SequenceCache = field(default_factory=SequenceCache)

    def keep(self, column: int, parts: Sequence[Tensor]) -> None:
        """Cache answers, one tensor [tokens, ...] per micro-batch, as a column."""
        self.cache.keep(column, self.plan, parts)
