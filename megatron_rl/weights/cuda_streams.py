"""CUDA streams for work concurrent with the trainer's own stream. On a CPU, where work is synchronous, they do nothing.

A publish has two such streams per device: one gathers and fills the next bucket while the other sends the current one.
On a single stream the next bucket's gathers would queue after the broadcast, which waits for the slowest server.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch

Done = torch.cuda.Event | None
"""Event that marks the work enqueued on a stream so far; None if the work is complete."""


class SideStream:
    """A CUDA stream next to the caller's own stream; without a stream (CPU) all methods do nothing."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @contextmanager
    def active(self, after: Done = None) -> Iterator[None]:
        """Enqueue work of the block on this stream, after all work of the caller's stream and after the event ``after``."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if after is not None:
            self._stream.wait_event(after)
        # torch.cuda.stream also sets the device, which in a new thread is the first one.
        with torch.cuda.stream(self._stream):
            yield

    def work_enqueued(self) -> Done:
        """Event that marks the work enqueued so far."""
        return None if self._stream is None else self._stream.record_event()

    def join(self) -> None:
        """Make later work of the caller's stream wait for the work enqueued on this stream so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def wait(self) -> None:
        """Block until this stream's work is complete."""
        if self._stream is not None:
            self._stream.synchronize()


@cache
def side_stream(device: torch.device, purpose: Literal["fill", "send"]) -> SideStream:
    """This process's stream for ``purpose``; cached, because torch's allocator reserves separate memory per stream."""
    return SideStream(torch.cuda.Stream(device) if device.type == "cuda" else None)
