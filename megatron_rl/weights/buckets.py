"""Fills flat buckets from a stream of tensors, which is always exhausted.

Two buffers alternate, so that one bucket can be sent while the next is filled: a bucket is valid until the second
bucket after it is requested. On a GPU a bucket is filled on a separate stream: its reader first waits for
``ready``.

A publish has two CUDA streams per device beside the trainer's own stream: one gathers and fills the next bucket
while the other sends the current one. On a single stream the next bucket's gathers would queue after the broadcast,
which waits for the slowest server. On a CPU, where work is synchronous, the streams do nothing.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import torch

from megatron_rl.families.parameters import TensorSpec
from megatron_rl.weights.bucket_plan import CoverageError, place

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


NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face names and full tensors, on CPU or GPU; each tensor is used before the next is requested."""

NO_BYTES = torch.empty(0, dtype=torch.uint8)


class TensorStreamError(RuntimeError):
    """Failure of the trainer's own stream of tensors, not caused by the servers."""


@dataclass(frozen=True)
class Bucket:
    specs: tuple[TensorSpec, ...]
    last: bool
    """True for the stream's last bucket."""
    flat: torch.Tensor = field(default=NO_BYTES, compare=False)
    """The tensors' bytes, concatenated: uint8 [num_bytes]; empty if they are on another rank."""
    ready: Done = field(default=None, compare=False)
    """Event after which ``flat`` is filled."""

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)


class BucketStream:
    """The buckets of a stream, one at a time; the next bucket is prepared while the current one is sent.

    A failure inside the stream becomes a TensorStreamError with the number of tensors before it.
    """

    def __init__(
        self, named_tensors: NamedTensors, bucket_bytes: int, device: torch.device, *, reuse_buffers: bool = True
    ) -> None:
        """``reuse_buffers=False`` gives each bucket separate memory on ``device``."""
        self.tensors = _guarded(named_tensors)
        self.peak_buffer_bytes = 0
        """Largest memory of the stream's buckets at one time so far."""
        self._bucket_bytes, self._device, self._reuse = bucket_bytes, device, reuse_buffers
        self._reused: dict[int, torch.Tensor] = {}
        self._separate_bytes: deque[int] = deque(maxlen=2)  # two buckets are valid at a time
        self._buckets = self._fill()
        self._side = side_stream(device, "fill")
        self._prepared: Bucket | None = None
        self._failure: Exception | None = None

    def prepare(self) -> None:
        """Fill the next bucket, if there is one and it is not filled yet; a failure is stored for ``look``."""
        if self._prepared is not None or self._failure is not None:
            return
        try:
            with self._side.active():
                bucket = next(self._buckets, None)
            self._prepared = bucket and replace(bucket, ready=self._side.work_enqueued())
        except (TensorStreamError, ValueError) as error:
            self._failure = error

    def look(self) -> Bucket:
        """The next bucket, which is filled now unless it was prepared.

        Raises TensorStreamError, ValueError for a tensor that cannot be sent (CoverageError for an empty stream),
        and LookupError after the last bucket.
        """
        self.prepare()
        if self._failure is not None:
            raise self._failure
        if self._prepared is None:
            raise LookupError("the bucket marked as last was the last one")
        return self._prepared

    def take(self) -> Bucket:
        """Remove and return the bucket of ``look``, so that the next bucket can be prepared."""
        bucket, self._prepared = self.look(), None
        return bucket

    def finish(self) -> str:
        """Exhaust the stream; returns its failure as text, because the caller may be handling another error."""
        try:
            with self._side.active():
                exhaust(self.tensors)
        except TensorStreamError as error:
            return str(error)
        finally:
            self._side.join()  # the next update changes the weights that the stream reads
        return ""

    def _fill(self) -> Iterator[Bucket]:
        specs: list[TensorSpec] = []
        flat = NO_BYTES
        placed: tuple[int, int] | None = None
        for name, tensor in self.tensors:
            spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
            previous, placed = placed, place(spec, placed, self._bucket_bytes)
            bucket, end = placed
            if previous is not None and bucket != previous[0]:
                yield Bucket(tuple(specs), last=False, flat=flat[: previous[1]])
                specs = []
            if not specs:
                flat = self._memory(bucket, spec.num_bytes)
            specs.append(spec)
            flat[end - spec.num_bytes : end].view(spec.dtype).view(spec.shape).copy_(tensor.detach())
        if placed is None:
            raise CoverageError("there are no tensors to send: the stream was empty")
        yield Bucket(tuple(specs), last=True, flat=flat[: placed[1]])

    def _memory(self, index: int, num_bytes: int) -> torch.Tensor:
        """Memory for bucket ``index``: ``bucket_bytes``, or more if its first tensor is larger. Two buffers alternate if reused."""
        parity = index % 2  # not the buffer of the previous bucket, which may still be read
        is_reused = self._reuse and num_bytes <= self._bucket_bytes
        flat = self._reused.get(parity) if is_reused else None
        if flat is None:
            flat = torch.empty(max(num_bytes, self._bucket_bytes), dtype=torch.uint8, device=self._device)
        if is_reused:
            self._reused[parity] = flat
        self._separate_bytes.append(0 if is_reused else flat.numel())
        reused_bytes = sum(buffer.numel() for buffer in self._reused.values())
        self.peak_buffer_bytes = max(self.peak_buffer_bytes, reused_bytes + sum(self._separate_bytes))
        return flat


def exhaust(stream: Iterable) -> None:
    """Exhaust the stream, because other trainer ranks wait in the collectives inside it."""
    for _ in stream:
        pass


def _guarded(named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    num_tensors = 0
    try:
        for name, tensor in named_tensors:
            yield name, tensor
            num_tensors += 1
    except Exception as error:
        raise TensorStreamError(
            f"the trainer's stream of tensors failed after {num_tensors} tensors with {type(error).__name__}: {error}"
        ) from error
