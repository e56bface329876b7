"""Frames of JSON over a pair of pipes, between the test process and the program process."""

import json
import os
import struct
from typing import Any

from megatron_rl.graders.sandbox.values import Unsendable, write_text

_MAX_FRAME_BYTES = 1 << 24
_HEADER = struct.Struct("!I")


class Gone(BaseException):
    """The other side has exited or violated the protocol. Not an Exception, so that tests cannot catch it."""


class Wire:
    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.files = (read_fd, write_fd)

    def send(self, message: Any) -> None:
        """Send one frame. Raises Unsendable, before any byte is sent, if the frame is too large."""
        body = write_text(message)
        if len(body) > _MAX_FRAME_BYTES:
            raise Unsendable(f"more than {_MAX_FRAME_BYTES >> 20} MB")
        rest = memoryview(_HEADER.pack(len(body)) + body)
        try:
            while rest:
                rest = rest[os.write(self.files[1], rest) :]
        except OSError as error:
            raise Gone("the program ended") from error

    def receive(self) -> dict[str, Any]:
        length = _HEADER.unpack(self._read(_HEADER.size))[0]
        if length > _MAX_FRAME_BYTES:
            raise Gone("the program sent too much")
        try:
            message = json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise Gone("the program sent an invalid reply") from error
        if type(message) is not dict:
            raise Gone("the program sent an invalid reply")
        return message

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.read(self.files[0], min(size, 1 << 20))
            except OSError as error:
                raise Gone("the program ended") from error
            if not part:
                raise Gone("the program ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
