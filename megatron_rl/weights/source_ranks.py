"""Source ranks: those that put tensors together and broadcast them to the servers, one per pipeline stage.

Every source has a process group of its own with all the servers' workers, so that stages gather and fill buckets at the
same time and no tensor travels through rank 0. Buckets travel one at a time, the sources taking turns.

Who waits for whom: a source other than rank 0 (``StageRank``) prepares a bucket and waits for the driver's message; the
driver waits for a source's next bucket. Nothing moves without the driver, so groups are made in the order of the
stages and every server sees all broadcasts in one order: with two of them in progress, two servers could wait for each
other's. Invariants: a source has at most one broadcast in progress and one bucket prepared; its stream is walked to the
end whatever happens, for the ranks inside its collectives.
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
    """What the driver asks of a source, and what the source answers.

    join      make ``group``; answered twice: with the ``bodies`` for the servers, then once all workers have joined
    describe  show the next ``bucket``; answered with it, without its bytes
    send      broadcast the bucket that was shown; not answered, the servers' answers tell
    end       the publish is over; answered
    abort     the publish failed: leave the group; answered
    answer    ``failure`` says why there is not what was asked for
    """

    verb: Literal["join", "describe", "send", "end", "abort", "answer"]
    group: GroupSpec | None = None
    bodies: tuple[dict, ...] = ()
    """One per server."""
    bucket: Bucket | None = None
    failure: str = ""


@dataclass(frozen=True)
class Channel:
    """Messages between the driver and one other rank, in order; both raise RuntimeError when the rank is lost."""

    rank: int
    """The rank at the other end."""
    send: Callable[[SourceMessage], None]
    receive: Callable[[], SourceMessage]


class RemoteSource:
    """The driver's view of a source on another rank."""

    def __init__(self, link: Channel) -> None:
        self.name = f"rank {link.rank}"
        self._link = link
        self._ended = False

    def open_group(self, calls: ServerCalls, group: GroupSpec) -> None:
        """Have the rank and the servers make a group; raises ServerCallError."""
        self._link.send(SourceMessage("join", group=group))
        answer = self._link.receive()
        if answer.failure:
            raise ServerCallError(f"{self.name}: {answer.failure}")
        futures = calls.submit("/init_weights_update_group", answer.bodies)
        joined = self._link.receive()
        futures.append(calls.run(_raise_if, f"{self.name}: {joined.failure}" if joined.failure else ""))
        wait_for_all(futures, group.timeout_s, f"all servers to join the group of {self.name}")

    def offer(self) -> Bucket:
        """The rank's next bucket, without its bytes; raises TensorStreamError where there is none."""
        self._link.send(SourceMessage("describe"))
        answer = self._link.receive()
        if answer.bucket is None:
            raise TensorStreamError(f"{self.name}: {answer.failure}")
        return answer.bucket

    def send(self, calls: ServerCalls) -> list[Future]:
        """Let the rank broadcast the bucket it offered; there is nothing to wait for here."""
        self._link.send(SourceMessage("send"))
        return []

    def finish(self, *, failed: bool) -> str:
        """Let the rank go; returns what went wrong there. A rank that is lost is named, not waited for."""
        if self._ended:
            return ""
        self._ended = True
        try:
            self._link.send(SourceMessage("abort" if failed else "end"))
            answer = self._link.receive()
        except RuntimeError as error:
            return f"{self.name} is lost: {error}"
        return f"{self.name}: {answer.failure}" if answer.failure else ""


class StageRank:
    """A source on a rank other than 0; keeps its group between publishes."""

    def __init__(self, link: Channel, bucket_bytes: int, *, driver: str = "") -> None:
        """``driver``: the driver's machine, for which 127.0.0.1 stands in the URLs of its servers."""
        self._link = link
        self._driver = driver
        self._bucket_bytes = bucket_bytes
        self._group: SyncGroup | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")

    def serve(self, named_tensors: NamedTensors, device: torch.device) -> None:
        """One publish, as the driver's messages say. Raises RuntimeError when the driver is lost."""
        stream = BucketStream(named_tensors, self._bucket_bytes, device)
        stream.prepare()
        broadcast: Future | None = None
        while True:
            match self._link.receive():
                case SourceMessage(verb="join", group=GroupSpec() as spec):
                    self._join(spec)
                case SourceMessage(verb="describe"):
                    # The buffer of the bucket before is filled again from the next one on: it must have left.
                    failure, broadcast = _outcome(broadcast), None
                    self._link.send(SourceMessage("answer", failure=failure) if failure else _described(stream))
                case SourceMessage(verb="send") if self._group is not None:
                    broadcast = self._threads.submit(self._group.broadcast, stream.take())
                    stream.prepare()  # the stream's collectives run here while the bucket travels
                case SourceMessage(verb="end" | "abort" as verb):
                    if verb == "abort":
                        self.close()  # frees servers inside a broadcast, and ends one that is in progress here
                    failures = [_outcome(broadcast), stream.finish()]
                    self._link.send(SourceMessage("answer", failure="; ".join(failure for failure in failures if failure)))
                    return
                case message:
                    raise RuntimeError(f"the driver asked a source for what cannot be done now: {message}")

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join(self, spec: GroupSpec) -> None:
        self.close()
        try:
            group = SyncGroup(spec, driver=self._driver)
        except OSError as error:
            self._link.send(SourceMessage("answer", failure=f"no way to the servers: {error}"))
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


def _described(stream: BucketStream) -> SourceMessage:
    """The next bucket for a peer: without its bytes, a failure in words."""
    try:
        return SourceMessage("answer", bucket=replace(stream.look(), flat=NO_BYTES, ready=None))
    except (TensorStreamError, ValueError) as error:
        return SourceMessage("answer", failure=str(error))


def _outcome(broadcast: Future | None) -> str:
    """Wait for a broadcast; what went wrong with it."""
    if broadcast is None or broadcast.exception() is None:
        return ""
    return str(broadcast.exception())


def _raise_if(failure: str) -> None:
    if failure:
        raise ServerCallError(failure)
