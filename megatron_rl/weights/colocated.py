"""The way to servers on the trainer's own devices: buckets by CUDA IPC, on a CPU by shared memory.

Every trainer rank fills the same buckets from the same stream of full tensors, on its own device, and the worker next to it
reads them there: worker t of server s those of rank s * tp_size + t. What travels by HTTP is a handle alone. The first of
a server's ranks feeds it: it gathers the handles of the others and makes the server's calls, so servers are fed side by
side, and the driver speaks to all ranks twice in a publish, however many buckets there are.

Who waits for whom: all ranks wait for the driver, which opens the servers' sessions first. At each bucket a server's ranks give
their handles to its first one, fill the next bucket, and wait until it says that the server has read this one. The stream's
collectives keep the servers within two buckets of each other. At the end the driver waits for the outcome on every rank.
Invariants: memory is filled again after it has been read; a failure ends the exchange of a server's ranks at that bucket; every
rank walks the stream to its end.

A server unpickles what it is sent, so whoever reaches its port can run code in it: bind servers to 127.0.0.1.
"""

import base64
import io
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing

from megatron_rl.weights.bucket_plan import Coverage, ServerAddress
from megatron_rl.weights.buckets import Bucket, BucketStream, NamedTensors, TensorStreamError
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls, wait_for_all
from megatron_rl.weights.transfer import PublishTransfer


def _no_peer(*args: Any) -> Any:
    raise RuntimeError("a trainer of one rank has no other to talk to")


@dataclass(frozen=True)
class RankMessaging:
    """What the ranks say to each other; all of it raises RuntimeError when a rank is lost.

    The defaults are those of a trainer of one rank.
    """

    rank: int = 0
    """This one."""
    tell: Callable[[Any], Any] = lambda word: word
    """Collective: the driver's word, on every rank."""
    report: Callable[[Any], list[Any]] = lambda word: [word]
    """Collective: the words of all ranks, by rank, on the driver."""
    send: Callable[[Any, int], None] = _no_peer
    """A word to one rank, which receives it."""
    receive: Callable[[int], Any] = _no_peer
    """The word of one rank."""


@dataclass(frozen=True)
class TransferResult:
    """What became of a rank's part."""

    failure: str = ""
    num_bytes: int = 0
    num_buckets: int = 0
    """That its server was asked for; 0 on a rank that feeds none."""


@dataclass(frozen=True)
class _PublishOrder:
    """The driver's word: who is to be fed. Without it there is no publish."""

    servers: tuple[ServerAddress, ...]
    version: int
    timeout_s: float


@dataclass(frozen=True)
class _MissingBucket:
    """In place of a handle: why there is none."""

    failure: str


class ColocatedSender:
    """The driver's part of one publish."""

    def __init__(self, named_tensors: NamedTensors, bucket_bytes: int, device: torch.device, ranks: RankMessaging) -> None:
        self._stream = _bucket_stream(named_tensors, bucket_bytes, device)
        self._ranks = ranks
        # The other ranks wait for this one inside the stream until each has a bucket.
        self._stream.prepare()
        self._ordered = self._reported = False

    def send(self, transfer: PublishTransfer, coverage: Coverage) -> None:
        """Raises ServerCallError, also for what failed on another rank."""
        calls = transfer.calls
        transfer.begin()
        self._ordered = transfer.touched = True
        order = self._ranks.tell(_PublishOrder(calls.servers, transfer.version, calls.timeout_s))
        own = _take_part(self._stream, order, self._ranks, coverage)
        self._reported = True
        outcomes: list[TransferResult] = self._ranks.report(own)
        transfer.num_bytes = max(outcome.num_bytes for outcome in outcomes)
        transfer.num_buckets = max(outcome.num_buckets for outcome in outcomes)
        if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
            raise ServerCallError("; ".join(failures))
        transfer.end()

    @property
    def peak_buffer_bytes(self) -> int:
        return self._stream.peak_buffer_bytes

    def finish(self, *, failed: bool) -> str:
        """Let the other ranks go, and walk the stream to its end with them."""
        if self._ordered:  # they have gone, or one of them is lost
            return ""
        self._ordered = True
        try:
            self._ranks.tell(None)
            note = self._stream.finish()
            self._ranks.report(TransferResult())
        except RuntimeError as error:
            return f"a rank is lost: {error}"
        return note


def follow(
    named_tensors: NamedTensors, bucket_bytes: int, device: torch.device, ranks: RankMessaging, coverage: Coverage
) -> None:
    """One publish on a rank other than the driver's. Raises RuntimeError when a rank is lost."""
    stream = _bucket_stream(named_tensors, bucket_bytes, device)
    stream.prepare()
    order = ranks.tell(None)
    ranks.report(_take_part(stream, order, ranks, coverage))


def _take_part(stream: BucketStream, order: _PublishOrder | None, ranks: RankMessaging, coverage: Coverage) -> TransferResult:
    """This rank's part, to the end of the stream."""
    outcome = TransferResult()
    for server in order.servers if order else ():
        if order and ranks.rank == server.first_rank:
            with ServerCalls((server,), order.timeout_s) as calls:
                outcome = _send_to_server(stream, calls, order.version, ranks, coverage)
        elif server.first_rank < ranks.rank < server.first_rank + server.tp_size:
            _send_to_feeder(stream, server.first_rank, ranks)
    note = stream.finish()
    return replace(outcome, failure=outcome.failure or (note and f"rank {ranks.rank}: {note}"))


def _send_to_server(stream: BucketStream, calls: ServerCalls, version: int, ranks: RankMessaging, coverage: Coverage) -> TransferResult:
    """All buckets to one server, from this rank and the others beside its workers."""
    (server,) = calls.servers
    others = range(server.first_rank + 1, server.first_rank + server.tp_size)
    outcome, last = TransferResult(), False
    while not last:
        bucket, own = _next(stream, coverage)
        # Theirs before anything else: they wait until these are taken.
        handles: list[Any] = [own, *(ranks.receive(other) for other in others)]
        unfilled = [i for i, handle in enumerate(handles) if isinstance(handle, _MissingBucket)]
        failure = "; ".join(f"rank {server.first_rank + i}: {handles[i].failure}" for i in unfilled)
        answers: list[Future] = []
        if bucket is not None:
            last = bucket.last
            if not failure:
                answers = calls.submit("/update_weights_from_tensor", [_body(handles, version, last=last)])
                num_bytes = outcome.num_bytes + bucket.num_bytes
                outcome = TransferResult(num_bytes=num_bytes, num_buckets=outcome.num_buckets + 1)
            # Also after a failure: the other ranks fill theirs now.
            stream.take()
            stream.prepare()
        try:
            wait_for_all(answers, calls.timeout_s, f"{server.url} to load bucket {outcome.num_buckets}")
        except ServerCallError as error:
            failure = str(error)
        for other in others:
            ranks.send(not failure, other)
        if failure:
            return replace(outcome, failure=failure)
    return outcome


def _send_to_feeder(stream: BucketStream, first_rank: int, ranks: RankMessaging) -> None:
    """All buckets to the worker next to this rank, by way of the rank that feeds its server."""
    last = False
    while not last:
        bucket, handle = _next(stream, Coverage())
        ranks.send(handle, first_rank)
        if bucket is not None:
            last = bucket.last
            stream.take()
            stream.prepare()
        if not ranks.receive(first_rank):
            return


def _next(stream: BucketStream, coverage: Coverage) -> tuple[Bucket | None, str | _MissingBucket]:
    """The next bucket, if it could be filled, and its handle, if the bucket may be sent."""
    bucket = None
    try:
        bucket = stream.look()
        for spec in bucket.specs:
            coverage.add(spec)
        coverage.check(complete=bucket.last)
        return bucket, handle_of(bucket)
    except (TensorStreamError, ValueError) as error:
        return bucket, _MissingBucket(str(error))


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


def _body(handles: Sequence[Any], version: int, *, last: bool) -> dict[str, Any]:
    return {
        "serialized_named_tensors": list(handles),
        "load_format": "flattened_bucket",
        "flush_cache": last,
        **({"weight_version": str(version)} if last else {}),
    }


def _name_devices_by_uuid() -> None:
    """Device numbers differ between trainer and server; SGLang's own patch of torch makes handles independent of them."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()
