"""Transfers buckets to servers on the trainer's own devices: by CUDA IPC, or on a CPU by shared memory.

Every trainer rank fills the same buckets from the same stream of full tensors on its own device. The server worker
on the same device reads them there: worker t of server s reads the buckets of rank s * tp_size + t. HTTP carries
only handles. The first rank of each server is its feeder: it gathers the handles of the server's other ranks and
makes the server's calls. Servers are thus fed in parallel, and the driver communicates with all ranks twice per
publish, for any number of buckets.

All ranks wait for the driver, which first opens the servers' sessions. At each bucket a server's ranks send their
handles to the feeder, fill the next bucket, and wait for the feeder's message that the server has read the current
one. The stream's collectives keep the servers within two buckets of each other. At the end the driver waits for the
result of every rank. Invariants: memory is refilled only after it has been read; a failure ends the exchange among
a server's ranks at that bucket; every rank exhausts the stream.

A server unpickles its requests, so any process that reaches its port can run code in it: bind servers to 127.0.0.1.
"""

import base64
import inspect
import io
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from megatron_rl.weights.bucket_plan import Coverage, ServerAddress
from megatron_rl.weights.buckets import Bucket, BucketStream, NamedTensors, TensorStreamError
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls, wait_for_all
from megatron_rl.weights.transfer import PublishTransfer


def _no_peer(*args: Any) -> Any:
    raise RuntimeError("a trainer of one rank has no peer to communicate with")


@dataclass(frozen=True)
class RankMessaging:
    """Communication between the trainer's ranks; all functions raise RuntimeError if a rank is lost.

    The defaults are for a trainer of one rank.
    """

    rank: int = 0
    """Rank of this process."""
    tell: Callable[[Any], Any] = lambda message: message
    """Collective: broadcasts the driver's message; returns it on every rank."""
    report: Callable[[Any], list[Any]] = lambda message: [message]
    """Collective: gathers the messages of all ranks, in order, on the driver."""
    send: Callable[[Any, int], None] = _no_peer
    """Function (message, rank) that sends a message to one rank, which must call ``receive``."""
    receive: Callable[[int], Any] = _no_peer
    """Function (rank) that returns the next message of one rank."""


_Transfer = tuple[str, int, int]
"""One rank's part in a publish: (failure or "", bytes, buckets). Only feeders send to a server; other ranks have 0."""
_PublishOrder = tuple[tuple[ServerAddress, ...], int, float]
"""(servers, version, timeout in seconds): the driver's message that starts a publish; the message None cancels it."""


class ColocatedSender:
    """The driver's part of one publish."""

    def __init__(self, named_tensors: NamedTensors, bucket_bytes: int, device: torch.device, ranks: RankMessaging) -> None:
        self._stream = _bucket_stream(named_tensors, bucket_bytes, device)
        self._ranks = ranks
        # Now, because the other ranks wait for this rank inside the stream until each has a bucket.
        self._stream.prepare()
        self._ordered = self._reported = False

    def send(self, transfer: PublishTransfer, coverage: Coverage) -> None:
        """Send the stream to the servers, together with the other ranks. Raises ServerCallError for any rank's failure."""
        calls = transfer.calls
        transfer.begin()
        self._ordered = transfer.touched = True
        order = self._ranks.tell((calls.servers, transfer.version, calls.timeout_s))
        own = _run_order(self._stream, order, self._ranks, coverage)
        self._reported = True
        outcomes: list[_Transfer] = self._ranks.report(own)
        failures, num_bytes, num_buckets = zip(*outcomes, strict=True)
        # Every server gets the same bytes, so one server's count is that of the publish.
        transfer.num_bytes, transfer.num_buckets = max(num_bytes), max(num_buckets)
        if any(failures):
            raise ServerCallError("; ".join(filter(None, failures)))
        transfer.end()

    @property
    def peak_buffer_bytes(self) -> int:
        return self._stream.peak_buffer_bytes

    def finish(self, *, failed: bool) -> str:
        """Release the other ranks and exhaust the stream with them; returns a failure, if any."""
        if self._ordered:  # the other ranks have finished, or one of them is lost
            return ""
        self._ordered = True
        try:
            self._ranks.tell(None)
            note = self._stream.finish()
            self._ranks.report(("", 0, 0))
        except RuntimeError as error:
            return f"a rank is lost: {error}"
        return note


def follow(
    named_tensors: NamedTensors, bucket_bytes: int, device: torch.device, ranks: RankMessaging, coverage: Coverage
) -> None:
    """Run one publish on a rank other than the driver's. Raises RuntimeError if a rank is lost."""
    stream = _bucket_stream(named_tensors, bucket_bytes, device)
    stream.prepare()
    order = ranks.tell(None)
    ranks.report(_run_order(stream, order, ranks, coverage))


def _run_order(stream: BucketStream, order: _PublishOrder | None, ranks: RankMessaging, coverage: Coverage) -> _Transfer:
    """Do this rank's part of the publish (if ``order`` is given) and exhaust the stream."""
    failure, num_bytes, num_buckets = "", 0, 0
    servers, version, timeout_s = order or ((), 0, 0.0)
    for server in servers:
        if ranks.rank == server.first_rank:
            with ServerCalls((server,), timeout_s) as calls:
                failure, num_bytes, num_buckets = _send_to_server(stream, calls, version, ranks, coverage)
        elif server.first_rank < ranks.rank < server.first_rank + server.tp_size:
            _send_to_feeder(stream, server.first_rank, ranks)
    note = stream.finish()
    return failure or (note and f"rank {ranks.rank}: {note}"), num_bytes, num_buckets


def _send_to_server(
    stream: BucketStream, calls: ServerCalls, version: int, ranks: RankMessaging, coverage: Coverage
) -> _Transfer:
    """Send all buckets to one server: the handles of this rank and of the server's other ranks."""
    (server,) = calls.servers
    others = range(server.first_rank + 1, server.first_rank + server.tp_size)
    num_bytes, num_buckets, last = 0, 0, False
    while not last:
        bucket, *own = _next(stream, coverage)
        # Receive first, because the other ranks block until their handles are received.
        received = [own, *(ranks.receive(other) for other in others)]
        handles = [handle for handle, _ in received]
        failure = "; ".join(f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(received, server.first_rank) if reason)
        replies: list[Future] = []
        if bucket is not None:
            last = bucket.last
            if not failure:
                replies = calls.submit("/update_weights_from_tensor", [_body(handles, version, last=last)])
                num_bytes += bucket.num_bytes
                num_buckets += 1
            # Even after a failure, because filling a bucket is collective and the other ranks do so now.
            stream.take()
            stream.prepare()
        try:
            wait_for_all(replies, calls.timeout_s, f"{server.url} to load bucket {num_buckets}")
        except ServerCallError as error:
            failure = str(error)
        for other in others:
            ranks.send(not failure, other)
        if failure:
            return failure, num_bytes, num_buckets
    return "", num_bytes, num_buckets


def _send_to_feeder(stream: BucketStream, first_rank: int, ranks: RankMessaging) -> None:
    """Send the handles of all buckets to ``first_rank``, the feeder of the server on this rank's device."""
    last = False
    while not last:
        # Coverage is checked by the feeder, which has the same buckets.
        bucket, *own = _next(stream, Coverage())
        ranks.send(own, first_rank)
        if bucket is not None:
            last = bucket.last
            stream.take()
            stream.prepare()
        if not ranks.receive(first_rank):
            return


def _next(stream: BucketStream, coverage: Coverage) -> tuple[Bucket | None, str, str]:
    """(next bucket, None if it could not be filled; its handle; the reason why it must not be sent, or empty)."""
    bucket = None
    try:
        bucket = stream.look()
        for spec in bucket.specs:
            coverage.add(spec)
        coverage.check(complete=bucket.last)
        return bucket, handle_of(bucket), ""
    except (TensorStreamError, ValueError) as error:
        return bucket, "", str(error)


def handle_of(bucket: Bucket) -> str:
    """Handle with which a server reads the bucket in place, in SGLang's format of a flattened bucket."""
    metadata, start = [], 0
    for spec in bucket.specs:
        end = start + spec.num_bytes
        # SimpleNamespace, because SGLang's unpickler admits only few classes; SGLang reads only these attributes.
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
    flat = _CudaHandle(bucket.flat) if bucket.flat.is_cuda else bucket.flat
    if bucket.ready is not None:
        bucket.ready.synchronize()
    # "file_system", because the default strategy sends file descriptors, which needs a key shared by both processes.
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        pickled = io.BytesIO()
        ForkingPickler(pickled).dump({"flattened_tensor": flat, "metadata": metadata})
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(pickled.getvalue()).decode()


def _bucket_stream(named_tensors: NamedTensors, bucket_bytes: int, device: torch.device) -> BucketStream:
    # No reuse on a GPU, because a server replies before its copies have run; torch frees memory once its handle is closed.
    return BucketStream(named_tensors, bucket_bytes, device, reuse_buffers=device.type != "cuda")


def _body(handles: Sequence[Any], version: int, *, last: bool) -> dict[str, Any]:
    return {
        "serialized_named_tensors": list(handles),
        "load_format": "flattened_bucket",
        "flush_cache": last,
        **({"weight_version": str(version)} if last else {}),
    }


class _CudaHandle:
    """A CUDA tensor whose pickle names its device by UUID, because trainer and server may number the devices differently.

    An SGLang server maps the UUID to its own number, as it does for handles that SGLang itself has made.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        names = list(inspect.signature(rebuild).parameters)
        position = names.index("storage_device")
        uuid = str(torch.cuda.get_device_properties(arguments[position]).uuid)
        return rebuild, (*arguments[:position], uuid, *arguments[position + 1 :])
