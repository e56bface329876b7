"""Flat buckets filled from a stream of tensors that is always walked to its end.

Two buffers take turns, so that one bucket can travel while the next one is filled: a bucket is valid until the next
but one is asked for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from megatron_rl.weights.plan import CoverageError, Slice, TensorSpec, place

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
        self._buckets = _fill_buckets(self.tensors, bucket_bytes, device, reuse_buffers=reuse_buffers)
        self._prepared: Bucket | None = None
        self._failure: Exception | None = None

    def prepare(self) -> None:
        """Fill the next bucket, unless one is filled or there is none; a failure is kept for ``look``."""
        if self._prepared is not None or self._failure is not None:
            return
        try:
            self._prepared = next(self._buckets, None)
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
            walk_to_end(self.tensors)
        except TensorStreamError as error:
            return str(error)
        return ""


def walk_to_end(stream: Iterable) -> None:
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


def _fill_buckets(
    stream: NamedTensors, bucket_bytes: int, device: torch.device, *, reuse_buffers: bool
) -> Iterator[Bucket]:
    buffers: dict[int, torch.Tensor] = {}
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
            turn = placed.bucket % 2  # not the buffer of the bucket before, which may still be read
            if spec.num_bytes > bucket_bytes or not reuse_buffers:
                flat = torch.empty(max(spec.num_bytes, bucket_bytes), dtype=torch.uint8, device=device)
            else:
                if turn not in buffers:
                    buffers[turn] = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
                flat = buffers[turn]
        specs.append(spec)
        flat[placed.offset : placed.end].view(spec.dtype).view(spec.shape).copy_(tensor.detach())
    if placed is None:
        raise CoverageError("there are no tensors to send: the stream was empty")
    yield Bucket(tuple(specs), last=True, flat=flat[: placed.end])
