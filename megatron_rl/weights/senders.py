"""Source ranks: those that put tensors together and broadcast them to the servers, one a pipeline stage.

Every source has a process group of its own with all the servers' workers, so that stages gather and fill buckets at the
same time and no tensor travels through rank 0. Buckets travel one at a time, the sources taking turns.

Who waits for whom: a source other than rank 0 (``StageRank``) prepares a bucket and waits for the driver's word; the
driver waits for a source's next bucket. Nothing moves without the driver, so groups are made in the order of the
stages and every server sees all broadcasts in one order: with two of them under way, two servers could wait for each
other's. Invariants: a source has at most one broadcast under way and one bucket prepared; its stream is walked to the
end whatever happens, for the ranks inside its collectives.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_rl.weights.buckets import NamedTensors, Shelf, TensorStreamError, drain
from megatron_rl.weights.plan import ServerAddress, TensorSpec
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls, wait_for_all
from megatron_rl.weights.sync_group import SyncGroup, join_bodies, listen


class Link(Protocol):
    """Messages between the driver and one other rank, in order; ``receive`` raises RuntimeError when the rank is lost."""

    rank: int
    """The rank at the other end."""

    def send(self, message: Any) -> None: ...

    def receive(self) -> Any: ...


@dataclass(frozen=True)
class Offer:
    """A bucket that is ready to travel."""

    specs: tuple[TensorSpec, ...]
    num_bytes: int
    last: bool
    """It is the source's last one."""
    failure: str = ""
    """Why there is no bucket; ``specs`` is empty then."""


@dataclass(frozen=True)
class Join:
    """To a source: make a group with these servers; answered by _Meeting, then Report."""

    name: str
    servers: tuple[ServerAddress, ...]
    backend: str
    timeout_s: float


@dataclass(frozen=True)
class _Meeting:
    address: str
    port: int


@dataclass(frozen=True)
class Show:
    """To a source: describe the next bucket; answered by Offer."""


@dataclass(frozen=True)
class Send:
    """To a source: broadcast the bucket that you offered. Not answered: the servers' answers tell."""


@dataclass(frozen=True)
class End:
    """To a source: the publish is over; answered by Report."""

    failed: bool


@dataclass(frozen=True)
class Report:
    failure: str


class LocalSource:
    """The driver's own stage: rank 0."""

    name = "rank 0"

    def __init__(self, named_tensors: NamedTensors, bucket_bytes: int, device: torch.device) -> None:
        """Fills the first bucket at once: the other ranks wait for rank 0 in the stream's first collectives."""
        self._group: SyncGroup | None = None
        self._shelf = Shelf(named_tensors, bucket_bytes, device)
        self._shelf.prepare()

    def open_group(
        self, calls: ServerCalls, name: str, backend: str, timeout_s: float, address: str | None
    ) -> SyncGroup:
        group, rendezvous = listen(name, calls.servers, backend, timeout_s, address)
        bodies = join_bodies(name, calls.servers, backend, rendezvous.address, rendezvous.port)
        futures = calls.submit("/init_weights_update_group", bodies)
        futures.append(calls.run(group.open, rendezvous))
        try:
            what = f"all servers to join the group at {rendezvous.address}:{rendezvous.port}"
            wait_for_all(futures, rendezvous.timeout_s, what)
        except ServerCallError:
            group.close()
            raise
        return group

    def use(self, group: SyncGroup) -> None:
        self._group = group

    def offer(self) -> Offer:
        """The next bucket; raises TensorStreamError or ValueError where there is none."""
        bucket = self._shelf.look()
        return Offer(bucket.specs, bucket.flat.numel(), bucket.last)

    def send(self, calls: ServerCalls) -> list[Future]:
        return [calls.run(self._group.broadcast, self._shelf.take().flat)]

    def finish(self, *, failed: bool) -> str:
        return drain(self._shelf.stream)


class RemoteSource:
    """The driver's view of a source on another rank."""

    def __init__(self, link: Link) -> None:
        self.name = f"rank {link.rank}"
        self._link = link
        self._ended = False

    def open_group(self, calls: ServerCalls, name: str, backend: str, timeout_s: float) -> None:
        self._link.send(Join(name, calls.servers, backend, timeout_s))
        meeting = self._link.receive()
        if isinstance(meeting, Report):
            raise ServerCallError(f"{self.name}: {meeting.failure}")
        bodies = join_bodies(name, calls.servers, backend, meeting.address, meeting.port)
        futures = calls.submit("/init_weights_update_group", bodies)
        report = self._link.receive()
        futures.append(calls.run(_raise_if, f"{self.name}: {report.failure}" if report.failure else ""))
        wait_for_all(futures, timeout_s, f"all servers to join the group of {self.name}")

    def offer(self) -> Offer:
        self._link.send(Show())
        offer = self._link.receive()
        if offer.failure:
            raise TensorStreamError(f"{self.name}: {offer.failure}")
        return offer

    def send(self, calls: ServerCalls) -> list[Future]:
        self._link.send(Send())
        return []

    def finish(self, *, failed: bool) -> str:
        """Let the rank go; returns what went wrong there. A rank that is lost is named, not waited for."""
        if self._ended:
            return ""
        self._ended = True
        try:
            self._link.send(End(failed))
            report = self._link.receive()
        except RuntimeError as error:
            return f"{self.name} is lost: {error}"
        return f"{self.name}: {report.failure}" if report.failure else ""


class StageRank:
    """A source on a rank other than 0; keeps its group between publishes."""

    def __init__(self, link: Link, bucket_bytes: int) -> None:
        self._link = link
        self._bucket_bytes = bucket_bytes
        self._group: SyncGroup | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")

    def serve(self, named_tensors: NamedTensors, device: torch.device) -> None:
        """One publish, as the driver's messages say. Raises RuntimeError when the driver is lost."""
        shelf = Shelf(named_tensors, self._bucket_bytes, device)
        shelf.prepare()
        travelling: Future | None = None
        while True:
            message = self._link.receive()
            if isinstance(message, Join):
                self._join(message)
            elif isinstance(message, Show):
                failure = _outcome(travelling)
                travelling = None
                self._link.send(Offer((), 0, last=True, failure=failure) if failure else _described(shelf))
            elif isinstance(message, Send):
                travelling = self._threads.submit(self._group.broadcast, shelf.take().flat)
                shelf.prepare()
            else:
                if message.failed:
                    self.close()  # frees servers inside a broadcast, and ends one that is under way here
                failures = [_outcome(travelling), drain(shelf.stream)]
                self._link.send(Report("; ".join(failure for failure in failures if failure)))
                return

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join(self, message: Join) -> None:
        self.close()
        try:
            group, rendezvous = listen(message.name, message.servers, message.backend, message.timeout_s)
        except OSError as error:
            self._link.send(Report(f"no way to the servers: {error}"))
            return
        self._link.send(_Meeting(rendezvous.address, rendezvous.port))
        try:
            group.open(rendezvous)
        except ServerCallError as error:
            group.close()
            self._link.send(Report(str(error)))
            return
        self._group = group
        self._link.send(Report(""))


def _described(shelf: Shelf) -> Offer:
    """The next bucket for a peer: a failure in words."""
    try:
        bucket = shelf.look()
    except (TensorStreamError, ValueError) as error:
        return Offer((), 0, last=True, failure=str(error))
    return Offer(bucket.specs, bucket.flat.numel(), bucket.last)


def _outcome(travelling: Future | None) -> str:
    """Wait for a broadcast; what went wrong with it."""
    if travelling is None or travelling.exception() is None:
        return ""
    return str(travelling.exception())


def _raise_if(failure: str) -> None:
    if failure:
        raise ServerCallError(failure)
