"""Shared memory in which each reward worker notes the item that it scores and since when.

The runner reads it without a request, so a worker that hangs, stops or dies still names the item to blame, and the worker
pays no system call for it.

Invariant: each field has one writer: the worker writes ``position`` and ``since`` while it owns a chunk, the runner writes
``limit``, and resets the fields only between chunks.
"""

import mmap
import struct
import time

PROGRESS_BYTES = 64
"""A cache line, so that workers do not slow each other down."""
IDLE = -1
"""Position of a worker that scores no item."""

_PROGRESS = struct.Struct("qd")
_LIMIT = struct.Struct("q")


class SharedProgress:
    """One worker's fields in the shared memory."""

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self._memory = memory
        self._offset = index * PROGRESS_BYTES

    def reset(self, num_items: int) -> None:
        """Runner, before it sends a chunk of ``num_items``."""
        self.set_position(IDLE)
        self.set_limit(num_items)

    def set_position(self, position: int) -> None:
        """Worker: it starts item ``position`` now, or is idle from now on."""
        _PROGRESS.pack_into(self._memory, self._offset, position, time.monotonic())

    def read(self) -> tuple[int, float]:
        """(position, monotonic time in seconds since when); the clock is the same in all processes of a node."""
        return _PROGRESS.unpack_from(self._memory, self._offset)

    def set_limit(self, limit: int) -> None:
        """Runner: the worker starts no item at or after ``limit``."""
        _LIMIT.pack_into(self._memory, self._offset + _PROGRESS.size, limit)

    def limit(self) -> int:
        return _LIMIT.unpack_from(self._memory, self._offset + _PROGRESS.size)[0]
