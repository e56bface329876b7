"""Source ranks: assemble tensors and broadcast them to the servers; one source per pipeline stage.

Every source has its own process group with all servers' workers, so that stages gather and fill buckets in parallel
and no tensor passes through rank 0. Buckets are sent one at a time, and the sources alternate.

A source other than rank 0 (``StageRank``) prepares a bucket and waits for the driver's message; the driver waits
for a source's next bucket. The driver starts every action, so groups are created in the order of the stages and all
servers receive all broadcasts in the same order: with different orders, two servers could wait for each other's
broadcast.

Invariants: a source has at most one broadcast in progress and one prepared bucket; its stream is always exhausted,
because other ranks wait in its collectives.

The process group between a source and the servers' workers is independent of the trainer's own groups. A server waits up to
30 minutes inside a broadcast (SGLang's default), so after a failure only the source can free the server, by closing its
sockets. ``SyncGroup`` is therefore the only owner of the torch objects; nothing else, also no exception's traceback, may
keep them alive.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them, but not for type checkers
from torch.distributed import distributed_c10d

from megatron_rl.system.gpu.gpu_environment import nccl_values
from megatron_rl.system.http.addresses import address_towards_all
from megatron_rl.system.processes.torch_store import listening_store
from megatron_rl.weights.bucket_plan import GroupSpec
from megatron_rl.weights.buckets import NO_BYTES, Bucket, BucketStream, NamedTensors, TensorStreamError, side_stream
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls, wait_for_all

MAX_CONNECT_S = 60.0
"""Longest wait for the workers to join. Joining takes well under a second, and a server that waits for a missing
worker serves no requests."""
_NCCL_GRACE_S = 60.0
_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Variables that torch reads when it creates a group: on an error, abort only the broadcast (ErrorHandlingMode,
ProcessGroupNCCL.hpp), and write no dump, after which the heartbeat monitor would kill the process."""


class SyncGroup:
    """The source rank's end of one group. Opened once and closed once; listens for the workers from construction on."""

    def __init__(self, spec: GroupSpec, *, driver: str = "") -> None:
        """Listen, only at the local address of the route to the servers.

        ``driver``: host of the driver if that is another node, where a server at 127.0.0.1 then is.
        Raises OSError if there is no route.
        """
        self.spec = spec
        self.address = address_towards_all([server.url for server in spec.servers], loopback_is=driver)
        self.connect_timeout_s = min(spec.timeout_s, MAX_CONNECT_S)
        # The store chooses a free port, because an earlier group may still occupy a fixed one.
        self._store: TCPStore | None = listening_store(
            self.address, world_size=spec.world_size, timeout_s=self.connect_timeout_s
        )
        self.port = self._store.port
        self._process_group: dist.ProcessGroup | None = None
        self._closed = False

    @property
    def timeout_s(self) -> float:
        """Timeout of a broadcast; with NCCL it ends after the HTTP calls, because their errors name the server that failed."""
        return self.spec.timeout_s + (_NCCL_GRACE_S if self.spec.backend == "nccl" else 0.0)

    def join_bodies(self) -> list[dict]:
        """Body of each server's request to /init_weights_update_group."""
        return [
            {
                "master_address": self.address,
                "master_port": self.port,
                "rank_offset": first_rank,
                "world_size": self.spec.world_size,
                "group_name": self.spec.name,
                "backend": self.spec.backend,
            }
            for first_rank in self.spec.first_ranks
        ]

    def open(self) -> None:
        """Wait until all workers have joined. Raises ServerCallError. May run in a separate thread."""
        world_size, store, self._store = self.spec.world_size, self._store, None
        if store is None:
            raise RuntimeError(f"the group {self.spec.name} was opened before; create a new group")
        failure = ""
        try:
            # Private functions, because torch's public API cannot create a group with processes outside the default
            # group. SGLang creates the servers' end with the same two calls.
            with _watchdog_aborts_broadcast_only():
                self._process_group, _ = distributed_c10d._new_process_group_helper(
                    world_size,
                    0,
                    [],
                    dist.Backend(self.spec.backend),
                    PrefixStore(self.spec.name, store),
                    group_name=distributed_c10d.GroupName(self.spec.name),
                    timeout=timedelta(seconds=self.connect_timeout_s),
                )
            distributed_c10d._world.pg_group_ranks[self._process_group] = {rank: rank for rank in range(world_size)}
            self._process_group.set_timeout(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            failure = _first_sentence(error)
        if self._closed:
            self._destroy()  # the caller timed out before the group was complete
        if failure:
            raise ServerCallError(
                f"the trainer waited {self.connect_timeout_s:g} s for {world_size - 1} server workers to join the "
                f"weight sync group: {failure}{_nccl_hint(self.spec.backend)}"
            )

    def broadcast(self, bucket: Bucket) -> None:
        """Send the bucket to all workers; blocks until sent. Raises ServerCallError. May run in a separate thread."""
        failure, side = "", side_stream(bucket.flat.device, "send")
        try:
            with side.active(after=bucket.ready):
                dist.broadcast(bucket.flat, group_src=0, group=self._process_group)
            side.wait()
        except RuntimeError as error:
            failure = _first_sentence(error)
        if failure:
            # With a hint, because NCCL creates its communicator at the first broadcast and detects differing settings then.
            raise ServerCallError(
                f"the broadcast of {bucket.num_bytes} bytes failed: {failure}{_nccl_hint(self.spec.backend)}"
            )

    def close(self) -> None:
        self._closed = True
        if self._process_group is not None:
            self._destroy()

    def _destroy(self) -> None:
        process_group, self._process_group = self._process_group, None
        if process_group is None:
            return
        if self.spec.backend == "nccl":
            process_group.abort()  # a broadcast in progress would otherwise never return
        dist.destroy_process_group(process_group)


def device_of(backend: str) -> torch.device:
    """Device that the buckets of a broadcast must be on."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


@contextmanager
def _watchdog_aborts_broadcast_only() -> Iterator[None]:
    """Set torch's variables so that, in a group created inside, NCCL's watchdog aborts a failed broadcast only.

    By default a killed server or a slow bucket would also kill the trainer process. The heartbeat stays enabled, so
    that a hanging watchdog is still detected.
    """
    before = {name: os.environ.get(name) for name in _WATCHDOG}
    os.environ.update(_WATCHDOG)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _nccl_hint(backend: str) -> str:
    if backend != "nccl":
        return ""
    values = " ".join(f"{name}={value}" for name, value in nccl_values(os.environ).items())
    return (
        f". Trainer and servers need the same values of NCCL's variables, and GPUs that no other process of the group uses; the "
        f"trainer has {values}: start servers with the same environment (SGLang uses 0 for variables that are not set)"
    )


def _first_sentence(error: RuntimeError) -> str:
    """The message without gloo's advice after the first sentence, which does not apply to this group."""
    return str(error).partition(". ")[0]


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
