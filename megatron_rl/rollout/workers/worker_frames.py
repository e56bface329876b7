"""Frames between a rollout worker and its owner: a pickle, and its arrays next to the pickle.

An array travels in one of two ways. Those of the worker's answers lie in its shared file (``system/files/shared_file.py``), which both
processes map: the frame says where. Those of the owner travel behind the frame, unless they lie in that file already:
then the frame says where, too. So a token that a worker has read from a server passes no socket again, in neither
direction.

The worker writes the file; the owner drops an array of it with the last reference, and says so.

Both sides run the same release of this package, and either the worker is the owner's child or the owner has shown the
worker its run's secret: a pickle from the other side is as good as one's own.
"""

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from megatron_rl.system.files.shared_file import ArrayRange

STREAM_BYTES = 1 << 22
"""Buffered of a connection before its sender has to wait."""
_HEAD = struct.Struct("<QI")
"""Bytes of the pickle, number of arrays."""
_RANGE = struct.Struct("<qq")
_BESIDE = -1
"""Replaces the first byte: the array follows the frame."""


class ArrayLocator(Protocol):
    """A file that both sides know."""

    def at(self, range_: ArrayRange) -> bytes | np.ndarray: ...


async def read_frame(reader: asyncio.StreamReader, file: ArrayLocator) -> Any:
    """The next message. Raises IncompleteReadError or ConnectionError at the end."""
    num_bytes, num_arrays = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    table = await reader.readexactly(_RANGE.size * num_arrays)
    body = await reader.readexactly(num_bytes)
    arrays: list[Any] = []
    for first, size in _RANGE.iter_unpack(table):
        arrays.append(await reader.readexactly(size) if first == _BESIDE else file.at(ArrayRange(first, size)))
    return pickle.loads(body, buffers=arrays)


def frame(message: Any, range_of: Callable[[memoryview], ArrayRange | None]) -> list[bytes | memoryview]:
    """``message`` in parts to write one after the other. An array whose ``range_of`` is None travels beside the message."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    ranges, beside = [], []
    for buffer in buffers:
        raw = buffer.raw()
        found = range_of(raw) if raw.nbytes else None
        if found is None:
            found = ArrayRange(_BESIDE, raw.nbytes)
            beside.append(raw)
        ranges.append(_RANGE.pack(*found))
    return [b"".join((_HEAD.pack(len(body), len(buffers)), *ranges, body)), *beside]
