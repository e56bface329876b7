"""The connection between a rollout worker and its owner: messages, their frames, and the owner's end.

The owner sends calls, the worker sends replies, both as lists of messages. A frame is one pickle, with its arrays
outside the pickle. Arrays of a reply are in the worker's shared file (``system/files/shared_file.py``), which both
processes map, so the frame contains only their ranges. Arrays of a call follow the frame, unless they are in that
file already. A token that a worker has read from a server therefore never passes through a socket again, in either
direction. The worker writes the file; the owner reports each range that it no longer references.

Unpickling is safe here: both ends run the same release of this package, and the worker is either the owner's child
or has checked the secret of the run.

Which process waits for which: a caller of ``WorkerConnection.call`` waits for the worker, whose event loop must
reply to a ping within ``SILENCE_S``. Once the connection has ended, for any reason, every caller gets
``WorkerLost``.
"""

import asyncio
import contextlib
import itertools
import pickle
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.system.files.shared_file import ArrayRange

SILENCE_S = 120.0
_POLLS_PER_SILENCE = 8
MESSAGES_PER_TURN = 64
"""Maximum number of messages per turn of the event loop, in either direction."""
STREAM_BYTES = 1 << 22
"""Bytes that a connection buffers before its sender must wait."""
_HEAD = struct.Struct("<QI")
"""Bytes of the pickle, number of arrays."""
_RANGE = struct.Struct("<qq")
_AFTER_FRAME = -1
"""Replaces the first byte of a range if the array follows the frame."""
PING = "ping"
"""Message that the other end returns at once, which proves that its event loop is running."""

ArrayAt = Callable[[ArrayRange], bytes | np.ndarray]
RangeOf = Callable[[memoryview], ArrayRange | None]


@dataclass(frozen=True)
class CallRequest:
    number: int
    call: Any
    """BatchCall, RemoteCall, a list of token sequences to decode to text without special tokens, or None: cancel
    the call with this number, whose reply no caller waits for."""


@dataclass(frozen=True)
class CallReply:
    """The result of the ``CallRequest`` with this number, or its error."""

    number: int
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class SetTokenizer:
    """Sets the tokenizer for all later calls that decode."""

    tokenizer_json: str
    """Content of tokenizer.json."""


@dataclass(frozen=True)
class Free:
    """Frees ranges of the worker's file that the owner no longer references."""

    ranges: Sequence[tuple[int, int]]
    """(first byte, number of bytes) of each range."""


async def read_frame(reader: asyncio.StreamReader, array_at: ArrayAt) -> Any:
    """Read the next message. Raises IncompleteReadError or ConnectionError at the end of the stream."""
    num_bytes, num_arrays = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    table = await reader.readexactly(_RANGE.size * num_arrays)
    body = await reader.readexactly(num_bytes)
    arrays: list[Any] = []
    for first, size in _RANGE.iter_unpack(table):
        arrays.append(await reader.readexactly(size) if first == _AFTER_FRAME else array_at(ArrayRange(first, size)))
    return pickle.loads(body, buffers=arrays)


def frame(message: Any, range_of: RangeOf) -> list[bytes | memoryview]:
    """Encode ``message`` as buffers to write in this order. Arrays for which ``range_of`` returns None follow the frame."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    ranges, following = [], []
    for buffer in buffers:
        raw = buffer.raw()
        range_ = range_of(raw) if raw.nbytes else None
        if range_ is None:
            range_ = ArrayRange(_AFTER_FRAME, raw.nbytes)
            following.append(raw)
        ranges.append(_RANGE.pack(*range_))
    return [b"".join((_HEAD.pack(len(body), len(buffers)), *ranges, body)), *following]


class WorkerConnection:
    """The owner's end of a connection; belongs to one event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, array_at: ArrayAt, range_of: RangeOf
    ) -> None:
        """``array_at`` returns an array of the worker's file; ``range_of``: range of an array, None if not in the file."""
        self._reader, self._writer = reader, writer
        self._array_at, self._range_of = array_at, range_of
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outgoing: list[Any] = []
        self._writing: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._received_at = time.monotonic()
        self.closed = False

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait for their reply."""
        return len(self._waiting)

    async def call(self, call: Any) -> Any:
        """Send a call and return its result. Raises the call's error, or the error passed to ``lose``."""
        number = next(self._numbers)
        waiting = self._waiting[number] = self._loop.create_future()
        self.send(CallRequest(number, call))
        try:
            return await waiting
        except asyncio.CancelledError:
            self.send(CallRequest(number, None))
            raise
        finally:
            self._waiting.pop(number, None)

    def send(self, message: Any) -> None:
        """Queue a message; all messages of one turn of the event loop are sent together."""
        if not self.closed:
            self._outgoing.append(message)
            if self._writing is None:
                self._writing = self._loop.create_task(self._write())

    async def read(self) -> str:
        """Deliver replies until the other end closes the connection. Returns what was wrong with a reply, if anything."""
        failure, num_read = "", 0
        try:
            while True:
                num_read += self._deliver(await read_frame(self._reader, self._array_at))
                if num_read >= MESSAGES_PER_TURN:
                    num_read = 0
                    await asyncio.sleep(0)  # reading buffered data does not let other tasks run
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # any failure must reach the callers, or they would wait forever
            failure = f"sent an unreadable message ({type(error).__name__}: {error})"
        self.closed = True
        self._writer.close()
        return failure

    def _deliver(self, messages: list[Any]) -> int:
        """Set the results of ``messages`` and return their number. Keeps no reference, so that their arrays can be freed."""
        self._received_at = time.monotonic()
        for message in messages:
            if isinstance(message, CallReply) and (waiting := self._waiting.get(message.number)) and not waiting.done():
                if message.error is not None:
                    waiting.set_exception(message.error)
                else:
                    waiting.set_result(message.result)
        return len(messages)

    async def wait_until_silent(self, silence_s: Callable[[], float]) -> None:
        """Ping the other end; returns once a ping got no reply for ``silence_s()``, or once the connection has ended."""
        while not self.closed:
            sent_at = time.monotonic()
            self.send(PING)
            while not self.closed:
                await asyncio.sleep(silence_s() / _POLLS_PER_SILENCE)
                if self._received_at >= sent_at:
                    break
                if time.monotonic() - sent_at >= silence_s():
                    return

    def lose(self, error: Exception) -> None:
        """Raise ``error`` in all callers that wait for a reply."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    def close(self) -> None:
        self.closed = True
        for waiting in self._waiting.values():
            waiting.cancel()
        if self._writing is not None:
            self._writing.cancel()
        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self._writer.transport.abort()  # the other end may never read the rest

    async def _write(self) -> None:
        """Send the queue as fast as the other end reads, because asyncio copies its own write buffer again and again."""
        while self._outgoing and not self.closed:
            messages, self._outgoing = self._outgoing[:MESSAGES_PER_TURN], self._outgoing[MESSAGES_PER_TURN:]
            try:
                self._writer.writelines(frame(messages, self._range_of))
            except Exception as error:  # a call that cannot be pickled fails in its caller, not in the event loop
                for message in messages:
                    if isinstance(message, CallRequest) and (waiting := self._waiting.get(message.number)) and not waiting.done():
                        waiting.set_exception(error)
            with contextlib.suppress(ConnectionError):  # ``read`` gets the same error
                await self._writer.drain()
            await asyncio.sleep(0)  # drain() yields only if the other end is slow
        self._writing = None
