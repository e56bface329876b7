"""The way to the servers over process groups: the driver's part, with a group for each source rank.

Groups are kept between publishes and made again, all of them in the order of the stages, when the set of servers or an
incarnation changed or a publish failed.
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
        """This process's group, and the names of all, one per source; raises ServerCallError."""
        own = self._own
        if own is None or self._servers != calls.servers or len(self._names) != 1 + len(remote):
            own = self._make(remote, calls)
        return own, self._names

    def close(self) -> None:
        """Forget the groups; this process's end is closed, the other sources close theirs themselves."""
        self._servers = ()
        if self._own is not None:
            self._own.close()
            self._own = None

    def release_servers(self, timeout_s: float, *, but: Collection[str]) -> None:
        """Have the servers destroy their ends, apart from the URLs ``but``; raises ServerCallError for one that is mute.

        A server is given ``timeout_s`` for all its groups.
        """
        self._forget_on(tuple(server for server in self._on_servers if server.url not in but), timeout_s)

    def _make(self, remote: Sequence[RemoteSource], calls: ServerCalls) -> SyncGroup:
        self.close()
        calls.get("/model_info")  # an unreachable server would leave the others waiting for it inside the rendezvous
        self._forget_on(calls.servers, self._timeout_s)
        # Never a name used before: after a failure a server may still have a group of that name.
        run = uuid.uuid4().hex[:12]
        self._names = tuple(f"weight-sync-{run}-{stage}" for stage in range(1 + len(remote)))
        self._on_servers.update({address: self._names for address in calls.servers})
        spec = GroupSpec(self._names[0], calls.servers, self.backend, self._timeout_s)
        self._own = _open_own(spec, calls)
        for name, source in zip(self._names[1:], remote, strict=True):
            source.open_group(calls, replace(spec, name=name))
        self._servers = calls.servers
        return self._own

    def _forget_on(self, servers: tuple[ServerAddress, ...], timeout_s: float) -> None:
        """Destroy the groups that an earlier connection left on ``servers``; one that is gone already is fine."""
        known = tuple(server for server in servers if server in self._on_servers)
        if not known:
            return
        names = [self._on_servers.pop(server) for server in known]
        deadline_s = time.monotonic() + timeout_s
        with ServerCalls(known, timeout_s) as calls:
            for stage in range(max(map(len, names))):
                calls.timeout_s = max(0.1, deadline_s - time.monotonic())
                # Where a server has fewer groups than another, its last one is named again and refused.
                bodies = [{"group_name": own[min(stage, len(own) - 1)]} for own in names]
                calls.accepts("/destroy_weights_update_group", bodies)


class GroupSender:
    """The driver's part of one publish: sends the buckets of its own stage and says when the other sources send theirs."""

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
        # At once: the other ranks wait for rank 0 in the stream's first collectives.
        self._stream.prepare()

    def send(self, transfer: PublishTransfer, coverage: Coverage) -> None:
        """Raises as ``requests`` and ``PublishTransfer.send_all`` do."""
        transfer.send_all(self.requests(transfer.calls, transfer.version, coverage))

    def requests(self, calls: ServerCalls, version: int, coverage: Coverage) -> Iterator[UpdateRequest]:
        """The sources' buckets in turns, until each has given its last one.

        Raises ServerCallError where no group came about; CoverageError before a bucket with a wrong tensor, or
        TensorStreamError, instead of giving it out.
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
            # All sources count together: a tensor that one lacks may still come from another.
            coverage.check(complete=not waiting)
            body = _body(bucket, name, version, last=not waiting)
            bodies = (body,) * len(calls.servers)
            yield UpdateRequest("/update_weights_from_distributed", bodies, bucket.num_bytes, start)

    @property
    def peak_buffer_bytes(self) -> int:
        return self._stream.peak_buffer_bytes

    def finish(self, *, failed: bool) -> str:
        """Let the other sources go and walk the own stream to its end; returns what went wrong there."""
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
