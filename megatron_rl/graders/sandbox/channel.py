"""Frames of JSON: the length of a body and the body, on the sandbox's sockets and pipes.

The trainer has the same framing for its own children (``system/processes/child_process.py``). The sandbox keeps a copy,
because what confines untrusted programs imports nothing of the trainer, and because a program's frames are bounded and
written by ``values.py``.
"""

import io
import json
import os
import struct
from collections.abc import Callable, Iterable
from typing import Any

from megatron_rl.graders.sandbox.values import NotSerializable, write_text

_MAX_FRAME_BYTES = 1 << 24
_HEADER = struct.Struct("!I")


def pack_frame(body: bytes) -> bytes:
    return _HEADER.pack(len(body)) + body


def read_frame(read: Callable[[int], bytes], max_bytes: int | None = None) -> bytes | None:
    """The next body; None at the end of the stream. ``read(n)`` returns at most n bytes, and none at the end.

    Raises ValueError before it reads a body of more than ``max_bytes``.
    """
    header = _read_exactly(read, _HEADER.size)
    if not header:
        return None
    (length,) = _HEADER.unpack(header)
    if max_bytes is not None and length > max_bytes:
        raise ValueError(f"a frame of {length} bytes; expected at most {max_bytes}")
    body = _read_exactly(read, length)
    return body if len(body) == length else None


def _read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """``size`` bytes; none at the end of the stream."""
    parts = []
    while size and (part := read(size)):
        parts.append(part)
        size -= len(part)
    return b"" if size else b"".join(parts)


def text_stream() -> io.TextIOWrapper:
    """A stream in memory, with the ``buffer`` that standard output has."""
    return io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogatepass", newline="", write_through=True)


def taken(streams: Iterable[io.TextIOWrapper]) -> list[str]:
    """Text of each stream, which is empty afterwards."""
    texts = []
    for stream in streams:
        stream.seek(0)
        texts.append(bytes(stream.buffer.read()).decode(errors="replace"))
        stream.seek(0)
        stream.truncate()
    return texts


class PeerGone(BaseException):
    """The peer has ended, or violates the protocol. Not an Exception, because tests must not catch it."""


class FrameChannel:
    """Frames of JSON objects over a pair of pipes, between the test process and the program process."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.files = (read_fd, write_fd)

    def send(self, message: Any) -> None:
        """Send one frame. Raises NotSerializable, before any byte is sent, if the frame is too large."""
        body = write_text(message)
        if len(body) > _MAX_FRAME_BYTES:
            raise NotSerializable(f"more than {_MAX_FRAME_BYTES >> 20} MB")
        rest = memoryview(pack_frame(body))
        try:
            while rest:
                rest = rest[os.write(self.files[1], rest) :]
        except OSError as error:
            raise PeerGone("the program ended") from error

    def receive(self) -> dict[str, Any]:
        try:
            body = read_frame(lambda size: os.read(self.files[0], min(size, 1 << 20)), _MAX_FRAME_BYTES)
        except OSError as error:
            raise PeerGone("the program ended") from error
        except ValueError as error:
            raise PeerGone("the program sent too much") from error
        if body is None:
            raise PeerGone("the program ended")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise PeerGone("the program sent something that is no answer") from error
        if type(message) is not dict:
            raise PeerGone("the program sent something that is no answer")
        return message
