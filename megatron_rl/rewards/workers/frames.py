"""What the runner and its worker processes say to each other.

Two channels per worker:

- A stream socket carries frames: a length and a JSON document. JSON, not pickle: what a worker sends back may have been
  touched by an untrusted response, and reading it must not run code.
- A slot of shared memory says which item the worker is at and since when. The runner reads it without asking, so a
  worker that hangs, stops or dies still says which item is to blame, and the worker pays no system call for it.

Invariant: a slot has one writer for each field: the worker writes ``position`` and ``since`` while it owns a chunk, the
runner writes ``limit``, and resets the slot only between chunks.
"""

import json
import mmap
import struct
import time
from typing import Any

HEADER = struct.Struct("!I")
SLOT_BYTES = 64
"""A cache line, so that workers do not slow each other down."""
IDLE = -1
"""Position of a worker that is not at an item."""

_PROGRESS = struct.Struct("qd")
_LIMIT = struct.Struct("q")


def pack(message: Any) -> bytes:
    """A frame. Lone surrogates and NUL bytes survive: JSON escapes them."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    return json.loads(body)


class SharedProgress:
    """One worker's window in the shared memory."""

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self._memory = memory
        self._offset = index * SLOT_BYTES

    def reset(self, num_items: int) -> None:
        """Runner, before it sends a chunk of ``num_items``."""
        self.set_position(IDLE)
        self.set_limit(num_items)

    def set_position(self, position: int) -> None:
        """Worker: it starts item ``position`` now, or is idle from now on."""
        _PROGRESS.pack_into(self._memory, self._offset, position, time.monotonic())

    def progress(self) -> tuple[int, float]:
        """(position, monotonic time in seconds since when); the clock is the same in all processes of a machine."""
        return _PROGRESS.unpack_from(self._memory, self._offset)

    def set_limit(self, limit: int) -> None:
        """Runner: the worker starts no item at or after ``limit``."""
        _LIMIT.pack_into(self._memory, self._offset + _PROGRESS.size, limit)

    def limit(self) -> int:
        return _LIMIT.unpack_from(self._memory, self._offset + _PROGRESS.size)[0]
