"""Transfers buckets over process groups, one per source rank: the driver's part.

Groups are kept between publishes. All of them are recreated, in the order of the stages, if the set of servers or an
incarnation has changed, or after a failed publish.
"""

import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.weights.bucket_plan import Coverage, GroupSpec, ServerAddress
from megatron_rl.weights.buckets import Bucket, BucketStream, NamedTensors
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls, wait_for_all
from megatron_rl.weights.source_ranks import RemoteSource
from megatron_rl.weights.sync_group import SyncGroup
from megatron_rl.weights.transfer import PublishTransfer, UpdateRequest


class Connections:
    """The groups of all sources with one set of servers."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self.backend = backend
        self._timeout_s = timeout_s
        self._servers: tuple[ServerAddress, ...] = ()
        self._names: tuple[str, ...] = ()
        self._own: SyncGroup | None = None
        self._on_servers: dict[ServerAddress, tuple[str, ...]] = {}

    def connect(self, remote: Sequence[RemoteSource], calls: ServerCalls) -> tuple[SyncGroup, tuple[str, ...]]:
        """This process's group and the names of all groups, one per source. Raises ServerCallError."""
        own = self._own
        if own is None or self._servers != calls.servers or len(self._names) != 1 + len(remote):
            own = self._make(remote, calls)
        return own, self._names

    def close(self) -> None:
        """Close this process's group and drop the others, which their sources close."""
        self._servers = ()
        if self._own is not None:
            self._own.close()
            self._own = None

    def release_servers(self, timeout_s: float, *, but: Collection[str]) -> None:
        """Make the servers, except the URLs ``but``, destroy their groups. Raises ServerCallError if a server is silent.

        ``timeout_s`` is a server's time limit for all its groups.
        """
        self._destroy_on(tuple(server for server in self._on_servers if server.url not in but), timeout_s)

    def _make(self, remote: Sequence[RemoteSource], calls: ServerCalls) -> SyncGroup:
        self.close()
        calls.get("/model_info")  # checked first: the other servers would wait for an unreachable one in the rendezvous
        self._destroy_on(calls.servers, self._timeout_s)
        # Unique names, because a server may still have a group of an earlier name after a failure.
        run = uuid.uuid4().hex[:12]
        self._names = tuple(f"weight-sync-{run}-{stage}" for stage in range(1 + len(remote)))
        self._on_servers.update({address: self._names for address in calls.servers})
        spec = GroupSpec(self._names[0], calls.servers, self.backend, self._timeout_s)
        self._own = _open_own(spec, calls)
        for name, source in zip(self._names[1:], remote, strict=True):
            source.open_group(calls, replace(spec, name=name))
        self._servers = calls.servers
        return self._own

    def _destroy_on(self, servers: tuple[ServerAddress, ...], timeout_s: float) -> None:
        """Destroy the groups that an earlier connection left on ``servers``; groups that no longer exist are ignored."""
        known = tuple(server for server in servers if server in self._on_servers)
        if not known:
            return
        names = [self._on_servers.pop(server) for server in known]
        deadline_s = time.monotonic() + timeout_s
        with ServerCalls(known, timeout_s) as calls:
            for stage in range(max(map(len, names))):
                calls.timeout_s = max(0.1, deadline_s - time.monotonic())
                # A server with fewer groups gets its last name again, and refuses it.
                bodies = [{"group_name": own[min(stage, len(own) - 1)]} for own in names]
                calls.accepts("/destroy_weights_update_group", bodies)


class GroupSender:
    """The driver's part of one publish: sends its own stage's buckets and schedules the other sources' buckets."""

    def __init__(
        self,
        connections: Connections,
        remote: Sequence[RemoteSource],
        named_tensors: NamedTensors,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self._connections = connections
        self._remote = remote
        self._stream = BucketStream(named_tensors, bucket_bytes, device)
        # Immediately, because the other ranks wait for rank 0 in the stream's first collectives.
        self._stream.prepare()

    def send(self, transfer: PublishTransfer, coverage: Coverage) -> None:
        """Send all sources' buckets; errors as of ``requests`` and ``PublishTransfer.send_all``."""
        transfer.send_all(self.requests(transfer.calls, transfer.version, coverage))

    def requests(self, calls: ServerCalls, version: int, coverage: Coverage) -> Iterator[UpdateRequest]:
        """Yield the sources' buckets, alternating between the sources until each has sent its last.

        Raises:
            ServerCallError: a group could not be created.
            CoverageError: the next bucket has a wrong tensor; it is not sent.
            TensorStreamError: a source's stream failed.
        """
        group, names = self._connections.connect(self._remote, calls)

        def send_own(calls: ServerCalls) -> list[Future]:
            return [calls.run(group.broadcast, self._stream.take())]

        offers = [self._stream.look, *(source.offer for source in self._remote)]
        starts = [send_own, *(source.send for source in self._remote)]
        waiting = deque(zip(names, offers, starts, strict=True))
        while waiting:
            name, offer, start = waiting.popleft()
            bucket = offer()
            if not bucket.last:
                waiting.append((name, offer, start))
            for spec in bucket.specs:
                coverage.add(spec)
            # Complete only after the last source, because a missing tensor may still come from another source.
            coverage.check(complete=not waiting)
            body = _body(bucket, name, version, last=not waiting)
            bodies = (body,) * len(calls.servers)
            yield UpdateRequest("/update_weights_from_distributed", bodies, bucket.num_bytes, start)

    @property
    def peak_buffer_bytes(self) -> int:
        return self._stream.peak_buffer_bytes

    def finish(self, *, failed: bool) -> str:
        """End the publish on the other sources and exhaust this rank's stream; returns the failures."""
        notes = [source.finish(failed=failed) for source in self._remote]
        notes.append(self._stream.finish())
        return "; ".join(note for note in notes if note)


def _open_own(spec: GroupSpec, calls: ServerCalls) -> SyncGroup:
    group = SyncGroup(spec)
    futures = calls.submit("/init_weights_update_group", group.join_bodies())
    futures.append(calls.run(group.open))
    try:
        what = f"all servers to join the group at {group.address}:{group.port}"
        wait_for_all(futures, group.connect_timeout_s, what)
    except ServerCallError:
        group.close()
        raise
    return group


def _body(bucket: Bucket, group_name: str, version: int, *, last: bool) -> dict[str, Any]:
    return {
        "names": [spec.name for spec in bucket.specs],
        "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in bucket.specs],
        "shapes": [list(spec.shape) for spec in bucket.specs],
        "group_name": group_name,
        "load_format": "flattened_bucket",
        "flush_cache": last,
        **({"weight_version": str(version)} if last else {}),
    }
