"""What a rollout worker and its owner send each other: a pickle, and the arrays in it beside it.

An array travels in one of two ways. Those of the worker's answers lie in its *shared file* (``SharedFile``), which both
processes map: the frame says where. Those of the owner travel behind the frame, unless they lie in that file already:
then the frame says where, too. So a token that a worker has read from a server passes no socket again, in neither
direction.

The shared file has no name (memfd): nothing is left of it, however both processes end, and no size of /dev/shm limits it.
It is a row of *extents*. The worker fills one after the other and never writes to one twice; the owner drops an extent
when nothing refers to it any more, and says so. Arrays of the shared file are read-only.

Both sides run the same release of this package on the same machine, and the worker is the owner's child: a pickle
from the other side is as good as one's own.
"""

import asyncio
import bisect
import mmap
import os
import pickle
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

STREAM_BYTES = 1 << 22
"""Buffered of a connection before its sender has to wait."""
Place = tuple[int, int, int, int]
"""Start of an extent in the file, its bytes, offset in it, bytes of the array."""
_EXTENT_BYTES = 1 << 24
_LARGE_BYTES = 1 << 20
"""An array from this size on has an extent of its own: a small one that lives longer would keep its memory."""
_ALIGNMENT = 64
_HEAD = struct.Struct("<QI")
"""Bytes of the pickle, number of arrays."""
_PLACE = struct.Struct("<qqqq")
_BESIDE = -1
"""In the place of an extent's start: the array follows the frame."""


async def read_frame(reader: asyncio.StreamReader, file: "SharedFile | SharedView") -> Any:
    """The next message. Raises IncompleteReadError or ConnectionError at the end."""
    num_bytes, num_arrays = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    table = await reader.readexactly(_PLACE.size * num_arrays)
    body = await reader.readexactly(num_bytes)
    arrays: list[Any] = []
    for place in _PLACE.iter_unpack(table):
        arrays.append(await reader.readexactly(place[3]) if place[0] == _BESIDE else file.at(place))
    return pickle.loads(body, buffers=arrays)


def frame(message: Any, place_of: Callable[[memoryview], Place | None]) -> list[bytes | memoryview]:
    """``message`` in parts to write one after the other; ``place_of`` an array None: it travels beside it."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    places, beside = [], []
    for buffer in buffers:
        raw = buffer.raw()
        place = place_of(raw) if raw.nbytes else None
        if place is None:
            place = (_BESIDE, 0, 0, raw.nbytes)
            beside.append(raw)
        places.append(_PLACE.pack(*place))
    return [b"".join((_HEAD.pack(len(body), len(buffers)), *places, body)), *beside]


class SharedFile:
    """The worker's side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = 0
        self._extents: dict[int, mmap.mmap] = {}
        self._open, self._used = -1, _EXTENT_BYTES
        """Start of the extent that small arrays go to, and how much of it is taken."""

    def put(self, raw: memoryview) -> Place:
        """Copies an array into the file."""
        if raw.nbytes >= _LARGE_BYTES:
            num_bytes = -(-raw.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            start, offset = self._new_extent(num_bytes), 0
        else:
            if self._used + raw.nbytes > _EXTENT_BYTES:
                self._open, self._used = self._new_extent(_EXTENT_BYTES), 0
            start, offset, num_bytes = self._open, self._used, _EXTENT_BYTES
            self._used += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._extents[start][offset : offset + raw.nbytes] = raw
        return start, num_bytes, offset, raw.nbytes

    def at(self, place: Place) -> memoryview:
        start, _, offset, num_bytes = place
        return memoryview(self._extents[start])[offset : offset + num_bytes].toreadonly()

    def drop(self, start: int) -> None:
        """The owner has nothing of this extent any more; its memory is free once nothing here has."""
        extent = self._extents.pop(start)
        # Not earlier: a worker that ends must leave what it has sent.
        weakref.finalize(extent, _forget, self._fd, start, len(extent)).atexit = False

    def _new_extent(self, num_bytes: int) -> int:
        start, self._end = self._end, self._end + num_bytes
        os.ftruncate(self._fd, self._end)
        self._extents[start] = mmap.mmap(self._fd, num_bytes, offset=start)
        return start


def _forget(fd: int, start: int, num_bytes: int) -> None:
    with mmap.mmap(fd, num_bytes, offset=start) as extent:
        extent.madvise(mmap.MADV_REMOVE)


@dataclass(frozen=True)
class _Mapped:
    address: int
    num_bytes: int
    start: int


class SharedView:
    """The owner's side. ``on_drop(start)`` is called, on any thread, when nothing refers to an extent any more."""

    def __init__(self, fd: int, on_drop: Callable[[int], None]) -> None:
        self._fd = fd
        self._on_drop = on_drop
        self._extents: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
        self._newest: tuple[int, mmap.mmap] | None = None
        """The extent that the worker fills: kept, as further arrays will come in it."""
        self._by_address: list[_Mapped] = []

    def at(self, place: Place) -> memoryview:
        start, num_bytes, offset, size = place
        extent = self._extents.get(start)
        if extent is None:
            extent = self._extents[start] = mmap.mmap(self._fd, num_bytes, offset=start, access=mmap.ACCESS_READ)
            weakref.finalize(extent, self._on_drop, start).atexit = False
            if size < _LARGE_BYTES:
                self._newest = start, extent
            address = np.frombuffer(extent, np.uint8).ctypes.data
            self._by_address = [one for one in self._by_address if one.start in self._extents]
            bisect.insort(self._by_address, _Mapped(address, num_bytes, start), key=lambda one: one.address)
        return memoryview(extent)[offset : offset + size]

    def place_of(self, raw: memoryview) -> Place | None:
        """Where an array lies in the file; None: elsewhere."""
        address = np.frombuffer(raw, np.uint8).ctypes.data
        index = bisect.bisect_right(self._by_address, address, key=lambda one: one.address) - 1
        if index < 0:
            return None
        one = self._by_address[index]
        # Another array may lie at the address of an extent that is gone, as long as it stands in the list.
        if one.start not in self._extents or address + raw.nbytes > one.address + one.num_bytes:
            return None
        return one.start, one.num_bytes, address - one.address, raw.nbytes

