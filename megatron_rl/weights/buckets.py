"""Flat buckets filled from a stream of tensors, and streams that are always walked to their end.

Two buffers take turns, so that one bucket can travel while the next one is filled: a bucket is valid until the next
but one is asked for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_rl.weights.plan import CoverageError, Placement, TensorSpec, place

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face names and full tensors, on CPU or GPU; each tensor is used before the next one is asked for."""


class TensorStreamError(RuntimeError):
    """The trainer's own stream of tensors failed; the servers are not at fault."""


@dataclass(frozen=True)
class Bucket:
    specs: tuple[TensorSpec, ...]
    flat: torch.Tensor
    """The tensors' bytes back to back: uint8 [num_bytes]."""
    last: bool
    """The stream ends with it."""


def fill_buckets(
    stream: NamedTensors, bucket_bytes: int, device: torch.device, *, reuse_buffers: bool = True
) -> Iterator[Bucket]:
    """Copy the stream into buckets on ``device``; ``reuse_buffers=False`` gives each bucket memory of its own.

    Raises CoverageError for an empty stream and ValueError for a tensor that cannot be sent.
    """
    buffers: list[torch.Tensor | None] = [None, None]
    specs: list[TensorSpec] = []
    flat = torch.empty(0, dtype=torch.uint8)
    placement: Placement | None = None
    for name, tensor in stream:
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        previous, placement = placement, place(spec, placement, bucket_bytes)
        if previous is not None and placement.bucket != previous.bucket:
            yield Bucket(tuple(specs), flat[: previous.end], last=False)
            specs = []
        if not specs:
            turn = placement.bucket % 2
            if spec.num_bytes > bucket_bytes or not reuse_buffers:
                flat = torch.empty(max(spec.num_bytes, bucket_bytes), dtype=torch.uint8, device=device)
            else:
                if buffers[turn] is None:
                    buffers[turn] = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
                flat = buffers[turn]
        specs.append(spec)
        flat[placement.offset : placement.end].view(spec.dtype).view(spec.shape).copy_(tensor.detach())
    if placement is None:
        raise CoverageError("there are no tensors to send: the stream was empty")
    yield Bucket(tuple(specs), flat[: placement.end], last=True)


def guarded(named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The same stream; a failure inside it becomes a TensorStreamError that says how far it got."""
    num_tensors = 0
    try:
        for name, tensor in named_tensors:
            yield name, tensor
            num_tensors += 1
    except Exception as error:
        raise TensorStreamError(
            f"the trainer's stream of tensors failed after {num_tensors} tensors with {type(error).__name__}: {error}"
        ) from error


def drain(stream: Iterator) -> str:
    """Walk the rest of the stream, as other trainer ranks wait inside its collectives; returns a note for the error."""
    try:
        for _ in stream:
            pass
    except TensorStreamError as error:
        return str(error)
    return ""


class Shelf:
    """Room for one bucket of a stream, and for the failure that came instead."""

    def __init__(
        self, named_tensors: NamedTensors, bucket_bytes: int, device: torch.device, *, reuse_buffers: bool = True
    ) -> None:
        self.stream = guarded(named_tensors)
        self._buckets = fill_buckets(self.stream, bucket_bytes, device, reuse_buffers=reuse_buffers)
        self._bucket: Bucket | None = None
        self._failure: Exception | None = None

    def prepare(self) -> None:
        """Fill the next bucket, if there is one and the shelf is empty."""
        if self._bucket is not None or self._failure is not None:
            return
        try:
            self._bucket = next(self._buckets, None)
        except (TensorStreamError, ValueError) as error:
            self._failure = error

    def look(self) -> Bucket | None:
        """The next bucket, filled now unless it was prepared; None after the last one. Raises what filling raised."""
        self.prepare()
        if self._failure is not None:
            raise self._failure
        return self._bucket

    def take(self) -> Bucket:
        bucket, self._bucket = self._bucket, None
        return bucket


def take_part(named_tensors: NamedTensors) -> None:
    """What trainer ranks that send nothing do in a publish: walk the stream for the collectives inside it."""
    for _ in named_tensors:
        pass
