"""The way to servers on the trainer's own devices: buckets by CUDA IPC, on a CPU by shared memory.

Every trainer rank fills the same buckets from the same stream of full tensors, on its own device, and hands the worker
next to it a handle: worker t of server s reads the memory of rank s * tp_size + t. What travels by HTTP is the handle
alone.

Who waits for whom: at each bucket every rank gives its handle to the driver and waits for its word; the driver waits
until the servers have read the bucket before. Memory is filled again two buckets later, and after the last bucket all
ranks wait for the driver's word once more. Invariant: a failure ends the exchange at the next bucket, and every rank
walks the stream to its end.

A server unpickles what it is sent, so whoever reaches its port can run code in it: bind servers to 127.0.0.1.
"""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing

from megatron_rl.weights.broadcast import UpdateRequest
from megatron_rl.weights.buckets import Bucket, BucketStream, NamedTensors
from megatron_rl.weights.plan import Coverage, ServerAddress
from megatron_rl.weights.server_calls import ServerCalls


@dataclass(frozen=True)
class Ranks:
    """What the ranks say to each other; both are collective and raise RuntimeError when a rank is lost.

    The defaults are those of a trainer of one rank.
    """

    gather: Callable[[str], list[str]] = lambda handle: [handle]
    """The handles of all ranks, by rank, on the driver."""
    agree: Callable[[bool], bool] = lambda go_on: go_on
    """The driver's word, on every rank."""


class ColocatedSender:
    """The driver's part of one publish."""

    def __init__(self, named_tensors: NamedTensors, bucket_bytes: int, device: torch.device, ranks: Ranks) -> None:
        self._stream = _bucket_stream(named_tensors, bucket_bytes, device)
        self._ranks = ranks
        # The other ranks wait for this one inside the stream until each has a bucket.
        self._stream.prepare()
        self._owes_word = False
        """The other ranks have given their handles, or had the last bucket, and wait."""
        self._ended = False

    def requests(self, calls: ServerCalls, version: int, coverage: Coverage) -> Iterator[UpdateRequest]:
        """The buckets as requests. Raises CoverageError before a bucket with a wrong tensor is given out."""
        last = False
        while not last:
            bucket = self._stream.look()
            last = bucket.last
            handles = self._ranks.gather(handle_of(bucket))
            self._owes_word = True  # from here on a failure must be said to them
            for spec in bucket.specs:
                coverage.add(spec)
            coverage.check(complete=last)
            bodies = tuple(_bodies(handles, calls.servers, version, last=last))
            yield UpdateRequest("/update_weights_from_tensor", bodies, bucket.num_bytes, self._go_on)

    @property
    def peak_buffer_bytes(self) -> int:
        return self._stream.peak_buffer_bytes

    def finish(self, *, failed: bool) -> str:
        """Let the other ranks go, and walk the stream to its end with them."""
        if self._ended:
            return ""
        self._ended = True
        try:
            if not self._owes_word:
                self._ranks.gather("")  # they come to the next bucket before they listen
            self._ranks.agree(not failed)
        except RuntimeError as error:
            return f"a rank is lost: {error}"
        return self._stream.finish()

    def _go_on(self, calls: ServerCalls) -> list[Future]:
        self._ranks.agree(True)
        self._owes_word = self._stream.take().last
        return []


def follow(named_tensors: NamedTensors, bucket_bytes: int, device: torch.device, ranks: Ranks) -> None:
    """One publish on a rank other than the driver's."""
    stream = _bucket_stream(named_tensors, bucket_bytes, device)
    last = False
    while not last:
        bucket = stream.look()
        last = bucket.last
        ranks.gather(handle_of(bucket))
        if not ranks.agree(True):
            stream.finish()
            return
        stream.take()
    ranks.agree(True)


def handle_of(bucket: Bucket) -> str:
    """What a server needs to read the bucket in place, in SGLang's notation of a flattened bucket."""
    metadata, start = [], 0
    for spec in bucket.specs:
        end = start + spec.num_bytes
        # SGLang's unpickler lets only few classes in, this one among them; it reads the attributes alone.
        metadata.append(
            SimpleNamespace(
                name=spec.name,
                shape=torch.Size(spec.shape),
                dtype=spec.dtype,
                start_idx=start,
                end_idx=end,
                numel=spec.num_bytes,
            )
        )
        start = end
    if bucket.flat.is_cuda:
        _name_devices_by_uuid()
    if bucket.ready is not None:
        bucket.ready.synchronize()
    # The other strategy sends a file descriptor, which needs a key that trainer and server do not share.
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        pickled = io.BytesIO()
        ForkingPickler(pickled).dump({"flattened_tensor": bucket.flat, "metadata": metadata})
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(pickled.getvalue()).decode()


def _bucket_stream(named_tensors: NamedTensors, bucket_bytes: int, device: torch.device) -> BucketStream:
    # A server on a GPU answers before its copies have run, and torch keeps memory whose handle is still held.
    return BucketStream(named_tensors, bucket_bytes, device, reuse_buffers=device.type != "cuda")


def _bodies(
    handles: Sequence[str], servers: Sequence[ServerAddress], version: int, *, last: bool
) -> Iterator[dict[str, Any]]:
    """One request per server."""
    for server in servers:
        yield {
            "serialized_named_tensors": list(handles[server.first_rank : server.first_rank + server.tp_size]),
            "load_format": "flattened_bucket",
            "flush_cache": last,
            **({"weight_version": str(version)} if last else {}),
        }


def _name_devices_by_uuid() -> None:
    """Device numbers differ between trainer and server; SGLang's own patch of torch makes handles independent of them."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()
