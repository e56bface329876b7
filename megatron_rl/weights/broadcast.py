"""The way to the servers over process groups: the driver's part, with a group for each source rank.

Groups are kept between publishes and made again, all of them in the order of the stages, when the set of servers or an
incarnation changed or a publish failed.
"""

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_rl.weights.plan import Coverage, ServerAddress
from megatron_rl.weights.senders import LocalSource, Offer, RemoteSource
from megatron_rl.weights.server_calls import ServerCalls
from megatron_rl.weights.sync_group import SyncGroup


@dataclass(frozen=True)
class Parcel:
    """A bucket on its way: what the servers are asked, and the start of its journey."""

    path: str
    bodies: tuple[dict, ...]
    """One a server."""
    num_bytes: int
    last: bool
    """Nothing comes after it."""
    start: Callable[[ServerCalls], list[Future]]
    """Called once the servers have been asked; what is left to be waited for."""


class Connections:
    """The groups of all sources with one set of servers."""

    def __init__(self, backend: str, timeout_s: float, master_address: str | None) -> None:
        self.backend = backend
        self._timeout_s = timeout_s
        self._master_address = master_address
        self._servers: tuple[ServerAddress, ...] = ()
        self._names: tuple[str, ...] = ()
        self._local: SyncGroup | None = None
        self._on_servers: dict[ServerAddress, tuple[str, ...]] = {}

    def connect(self, local: LocalSource, remote: Sequence[RemoteSource], calls: ServerCalls) -> tuple[str, ...]:
        """The groups' names, one a source; raises ServerCallError."""
        if self._local is None or self._servers != calls.servers or len(self._names) != 1 + len(remote):
            self._make(local, remote, calls)
        local.use(self._local)
        return self._names

    def close(self) -> None:
        """Forget the groups; this process's end is closed, the other sources close theirs themselves."""
        self._servers = ()
        if self._local is not None:
            self._local.close()
            self._local = None

    def leave_servers(self) -> None:
        """Have the servers destroy their ends; raises ServerCallError for one that does not answer."""
        self._forget_on(tuple(self._on_servers))

    def _make(self, local: LocalSource, remote: Sequence[RemoteSource], calls: ServerCalls) -> None:
        self.close()
        calls.get("/model_info")  # an unreachable server would leave the others waiting for it inside the rendezvous
        self._forget_on(calls.servers)
        run = uuid.uuid4().hex[:12]
        self._names = tuple(f"weight-sync-{run}-{stage}" for stage in range(1 + len(remote)))
        self._on_servers.update({address: self._names for address in calls.servers})
        self._local = local.open_group(calls, self._names[0], self.backend, self._timeout_s, self._master_address)
        for name, source in zip(self._names[1:], remote):
            source.open_group(calls, name, self.backend, self._timeout_s)
        self._servers = calls.servers

    def _forget_on(self, servers: tuple[ServerAddress, ...]) -> None:
        """Destroy the groups that an earlier connection left on ``servers``; one that is gone already is fine."""
        known = tuple(server for server in servers if server in self._on_servers)
        if not known:
            return
        names = [self._on_servers.pop(server) for server in known]
        with ServerCalls(known, self._timeout_s) as calls:
            for stage in range(max(map(len, names))):
                bodies = [{"group_name": own[min(stage, len(own) - 1)]} for own in names]
                calls.post_each("/destroy_weights_update_group", bodies, allow_refusal=True)


def broadcast_parcels(
    sources: Sequence[LocalSource | RemoteSource],
    names: Sequence[str],
    num_servers: int,
    version: int,
    coverage: Coverage,
) -> Iterator[Parcel]:
    """The sources' buckets in turns, until each has given its last one.

    Raises CoverageError before a parcel with a wrong tensor, or TensorStreamError, instead of giving it out.
    """
    waiting = deque(zip(sources, names, strict=True))
    while waiting:
        source, name = waiting.popleft()
        offer = source.offer()
        if not offer.last:
            waiting.append((source, name))
        for spec in offer.specs:
            coverage.add(spec)
        coverage.check(complete=not waiting)
        body = _body(offer, name, version, last=not waiting)
        yield Parcel(
            "/update_weights_from_distributed", (body,) * num_servers, offer.num_bytes, not waiting, source.send
        )


def _body(offer: Offer, group_name: str, version: int, *, last: bool) -> dict:
    return {
        "names": [spec.name for spec in offer.specs],
        "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in offer.specs],
        "shapes": [list(spec.shape) for spec in offer.specs],
        "group_name": group_name,
        "load_format": "flattened_bucket",
        "flush_cache": last,
        **({"weight_version": str(version)} if last else {}),
    }
