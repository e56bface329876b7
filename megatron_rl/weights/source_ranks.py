"""Source ranks: assemble tensors and broadcast them to the servers; one source per pipeline stage.

Every source has its own process group with all servers' workers, so that stages gather and fill buckets in parallel
and no tensor passes through rank 0. Buckets are sent one at a time, and the sources alternate.

A source other than rank 0 (``StageRank``) prepares a bucket and waits for the driver's message; the driver waits
for a source's next bucket. The driver starts every action, so groups are created in the order of the stages and all
servers receive all broadcasts in the same order: with different orders, two servers could wait for each other's
broadcast.

Invariants: a source has at most one broadcast in progress and one prepared bucket; its stream is always exhausted,
because other ranks wait in its collectives.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatron_rl.weights.bucket_plan import GroupSpec
from megatron_rl.weights.buckets import NO_BYTES, Bucket, BucketStream, NamedTensors, TensorStreamError
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls, wait_for_all
from megatron_rl.weights.sync_group import SyncGroup


@dataclass(frozen=True)
class SourceMessage:
    """Request of the driver to a source, or the source's reply.

    join      create ``group``; two replies: the ``bodies`` for the servers, then another once all workers have joined
    describe  describe the next bucket; the reply has the ``bucket`` without its bytes
    send      broadcast the described bucket; no reply, because the servers' replies show success
    end       the publish is complete; has a reply
    abort     the publish failed: close the group; has a reply
    answer    the reply; ``failure`` is the reason why the request failed, else empty
    """

    verb: Literal["join", "describe", "send", "end", "abort", "answer"]
    group: GroupSpec | None = None
    bodies: tuple[dict, ...] = ()
    """One request body per server."""
    bucket: Bucket | None = None
    failure: str = ""


@dataclass(frozen=True)
class Channel:
    """Ordered messages between the driver and one other rank; both functions raise RuntimeError if the rank is lost."""

    rank: int
    """The rank at the other end."""
    send: Callable[[SourceMessage], None]
    receive: Callable[[], SourceMessage]


class RemoteSource:
    """The driver's proxy of a source on another rank."""

    def __init__(self, link: Channel) -> None:
        self.name = f"rank {link.rank}"
        self._link = link
        self._ended = False

    def open_group(self, calls: ServerCalls, group: GroupSpec) -> None:
        """Make the rank and the servers create a group. Raises ServerCallError."""
        self._link.send(SourceMessage("join", group=group))
        reply = self._link.receive()
        if reply.failure:
            raise ServerCallError(f"{self.name}: {reply.failure}")
        futures = calls.submit("/init_weights_update_group", reply.bodies)
        joined = self._link.receive()
        # As a future, so that this failure is reported together with those of the servers.
        futures.append(calls.run(_raise_if, f"{self.name}: {joined.failure}" if joined.failure else ""))
        wait_for_all(futures, group.timeout_s, f"all servers to join the group of {self.name}")

    def offer(self) -> Bucket:
        """The rank's next bucket, without its bytes. Raises TensorStreamError if the rank has no bucket."""
        self._link.send(SourceMessage("describe"))
        reply = self._link.receive()
        if reply.bucket is None:
            raise TensorStreamError(f"{self.name}: {reply.failure}")
        return reply.bucket

    def send(self, calls: ServerCalls) -> list[Future]:
        """Make the rank broadcast the bucket that it offered; returns no futures, because the rank does not reply."""
        self._link.send(SourceMessage("send"))
        return []

    def finish(self, *, failed: bool) -> str:
        """End the rank's publish, or abort it if ``failed``; returns the rank's error message, or "". A lost rank is not waited for."""
        if self._ended:
            return ""
        self._ended = True
        try:
            self._link.send(SourceMessage("abort" if failed else "end"))
            reply = self._link.receive()
        except RuntimeError as error:
            return f"{self.name} is lost: {error}"
        return f"{self.name}: {reply.failure}" if reply.failure else ""


class StageRank:
    """A source on a rank other than 0; keeps its group between publishes."""

    def __init__(self, link: Channel, bucket_bytes: int, *, driver: str = "") -> None:
        """``driver``: the driver's host, which replaces 127.0.0.1 in the URLs of its servers."""
        self._link = link
        self._driver = driver
        self._bucket_bytes = bucket_bytes
        self._group: SyncGroup | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")

    def serve(self, named_tensors: NamedTensors, device: torch.device) -> None:
        """Run one publish, controlled by the driver's messages. Raises RuntimeError if the driver is lost."""
        stream = BucketStream(named_tensors, self._bucket_bytes, device)
        stream.prepare()
        broadcast: Future | None = None
        while True:
            match self._link.receive():
                case SourceMessage(verb="join", group=GroupSpec() as spec):
                    self._join(spec)
                case SourceMessage(verb="describe"):
                    # Wait first, because the next bucket reuses the buffer of the bucket being broadcast.
                    failure, broadcast = _failure_of(broadcast), None
                    self._link.send(SourceMessage("answer", failure=failure) if failure else _description(stream))
                case SourceMessage(verb="send") if self._group is not None:
                    broadcast = self._threads.submit(self._group.broadcast, stream.take())
                    stream.prepare()  # the stream's collectives run in this thread during the broadcast
                case SourceMessage(verb="end" | "abort" as verb):
                    if verb == "abort":
                        self.close()  # frees servers inside a broadcast, and aborts this rank's broadcast
                    failures = [_failure_of(broadcast), stream.finish()]
                    self._link.send(SourceMessage("answer", failure="; ".join(failure for failure in failures if failure)))
                    return
                case message:
                    raise RuntimeError(f"the driver sent a request that a source cannot handle in its current state: {message}")

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join(self, spec: GroupSpec) -> None:
        self.close()
        try:
            group = SyncGroup(spec, driver=self._driver)
        except OSError as error:
            self._link.send(SourceMessage("answer", failure=f"no route to the servers: {error}"))
            return
        self._link.send(SourceMessage("answer", bodies=tuple(group.join_bodies())))
        try:
            group.open()
        except ServerCallError as error:
            group.close()
            self._link.send(SourceMessage("answer", failure=str(error)))
            return
        self._group = group
        self._link.send(SourceMessage("answer"))


def _description(stream: BucketStream) -> SourceMessage:
    """Reply that describes the stream's next bucket (without its bytes) or the stream's failure."""
    try:
        return SourceMessage("answer", bucket=replace(stream.look(), flat=NO_BYTES, ready=None))
    except (TensorStreamError, ValueError) as error:
        return SourceMessage("answer", failure=str(error))


def _failure_of(broadcast: Future | None) -> str:
    """Wait for a broadcast; returns its error message, or an empty string."""
    if broadcast is None or broadcast.exception() is None:
        return ""
    return str(broadcast.exception())


def _raise_if(failure: str) -> None:
    if failure:
        raise ServerCallError(failure)
