"""Work of a GPU that runs beside what the trainer's own stream was asked for. On a CPU work is done when it is asked for: there
the same calls change nothing.

A publish has two such streams per device: one gathers and fills the next bucket while the other sends the one before. On
one stream the next bucket's gathers would queue behind the broadcast, which ends when the slowest server has come.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch

Done = torch.cuda.Event | None
"""What a stream has been asked for up to a moment; None: it is done."""


class SideStream:
    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @contextmanager
    def active(self, after: Done = None) -> Iterator[None]:
        """Work asked for inside runs here, after what the caller's own stream was asked for, and after ``after``."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if after is not None:
            self._stream.wait_event(after)
        # The stream's device too: a thread begins on the first one.
        with torch.cuda.stream(self._stream):
            yield

    def work_enqueued(self) -> Done:
        return None if self._stream is None else self._stream.record_event()

    def join(self) -> None:
        """What the caller's own stream is asked for from now on waits for this one's work, as far as it was asked for."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def wait(self) -> None:
        """Until this one's work is done."""
        if self._stream is not None:
            self._stream.synchronize()


@cache
def side_stream(device: torch.device, purpose: Literal["fill", "send"]) -> SideStream:
    """The one of this process: torch's allocator keeps memory apart by streams, so that each further one would cost its own."""
    return SideStream(torch.cuda.Stream(device) if device.type == "cuda" else None)
