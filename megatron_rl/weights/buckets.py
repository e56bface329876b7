"""Flat buckets filled from a stream of tensors that is always walked to its end.

Two buffers take turns, so that one bucket can travel while the next one is filled: a bucket is valid until the next
but one is asked for. On a GPU it is filled on a stream of its own (``cuda_streams.py``): whoever reads it waits for
``ready`` first.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from megatron_rl.families.parameters import TensorSpec
from megatron_rl.weights.bucket_plan import CoverageError, Slice, place
from megatron_rl.weights.cuda_streams import Done, side_stream

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face names and full tensors, on CPU or GPU; each tensor is used before the next one is asked for."""

NO_BYTES = torch.empty(0, dtype=torch.uint8)


class TensorStreamError(RuntimeError):
    """The trainer's own stream of tensors failed; the servers are not at fault."""


@dataclass(frozen=True)
class Bucket:
    specs: tuple[TensorSpec, ...]
    last: bool
    """The stream ends with it."""
    flat: torch.Tensor = field(default=NO_BYTES, compare=False)
    """The tensors' bytes back to back: uint8 [num_bytes]; empty where another rank holds them."""
    ready: Done = field(default=None, compare=False)
    """When ``flat`` holds them."""

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)


class BucketStream:
    """The buckets of a stream, one at a time, the next one prepared while the one before travels.

    A failure inside the stream becomes a TensorStreamError that says how far it got.
    """

    def __init__(
        self, named_tensors: NamedTensors, bucket_bytes: int, device: torch.device, *, reuse_buffers: bool = True
    ) -> None:
        """``reuse_buffers=False`` gives each bucket memory of its own on ``device``."""
        self.tensors = _guarded(named_tensors)
        self._buffers = _Buffers(bucket_bytes, device, reuse=reuse_buffers)
        self._buckets = _fill_buckets(self.tensors, bucket_bytes, self._buffers)
        self._side = side_stream(device, "fill")
        self._prepared: Bucket | None = None
        self._failure: Exception | None = None

    def prepare(self) -> None:
        """Fill the next bucket, unless one is filled or there is none; a failure is kept for ``look``."""
        if self._prepared is not None or self._failure is not None:
            return
        try:
            with self._side.active():
                bucket = next(self._buckets, None)
            self._prepared = bucket and replace(bucket, ready=self._side.work_enqueued())
        except (TensorStreamError, ValueError) as error:
            self._failure = error

    def look(self) -> Bucket:
        """The next bucket, filled now unless it was prepared.

        Raises TensorStreamError, ValueError for a tensor that cannot be sent (CoverageError for an empty stream), and
        LookupError after the last bucket.
        """
        self.prepare()
        if self._failure is not None:
            raise self._failure
        if self._prepared is None:
            raise LookupError("the bucket marked as last was the last one")
        return self._prepared

    def take(self) -> Bucket:
        """The bucket that ``look`` shows; the next one may be prepared from now on."""
        bucket, self._prepared = self.look(), None
        return bucket

    def finish(self) -> str:
        """Walk what is left of the stream; returns what went wrong there, for an error that is raised already."""
        try:
            with self._side.active():
                exhaust(self.tensors)
        except TensorStreamError as error:
            return str(error)
        finally:
            self._side.join()  # the next update changes what is read there
        return ""

    @property
    def peak_buffer_bytes(self) -> int:
        """Largest memory of its buckets at one time so far."""
        return self._buffers.peak_bytes


def exhaust(stream: Iterable) -> None:
    """Ask for everything that is left: other trainer ranks wait in the collectives inside the stream."""
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


class _Buffers:
    """The memory of buckets, by turns."""

    def __init__(self, bucket_bytes: int, device: torch.device, *, reuse: bool) -> None:
        self._bucket_bytes, self._device, self._reuse = bucket_bytes, device, reuse
        self._kept: dict[int, torch.Tensor] = {}
        self._given: deque[int] = deque(maxlen=2)  # a bucket is valid until the next but one is asked for
        self.peak_bytes = 0

    def take(self, index: int, num_bytes: int) -> torch.Tensor:
        """For bucket ``index``, whose first tensor has ``num_bytes``."""
        turn = index % 2  # not the buffer of the bucket before, which may still be read
        if num_bytes <= self._bucket_bytes and self._reuse:
            if turn not in self._kept:
                self._kept[turn] = self._empty(self._bucket_bytes)
            self._given.append(0)
            flat = self._kept[turn]
        else:
            flat = self._empty(max(num_bytes, self._bucket_bytes))
            self._given.append(flat.numel())
        held = sum(buffer.numel() for buffer in self._kept.values())
        self.peak_bytes = max(self.peak_bytes, held + sum(self._given))
        return flat

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _fill_buckets(stream: NamedTensors, bucket_bytes: int, buffers: _Buffers) -> Iterator[Bucket]:
    specs: list[TensorSpec] = []
    flat = NO_BYTES
    placed: Slice | None = None
    for name, tensor in stream:
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        previous, placed = placed, place(spec, placed, bucket_bytes)
        if previous is not None and placed.bucket != previous.bucket:
            yield Bucket(tuple(specs), last=False, flat=flat[: previous.end])
            specs = []
        if not specs:
            flat = buffers.take(placed.bucket, spec.num_bytes)
        specs.append(spec)
        flat[placed.offset : placed.end].view(spec.dtype).view(spec.shape).copy_(tensor.detach())
    if placed is None:
        raise CoverageError("there are no tensors to send: the stream was empty")
    yield Bucket(tuple(specs), last=True, flat=flat[: placed.end])
