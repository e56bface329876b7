"""The extra process group between a source rank of the trainer and the workers of the SGLang servers.

It stands next to the trainer's own groups and knows nothing of them. A server's end waits up to 30 minutes inside a
broadcast (SGLang's default), so what frees it after a failure is the source closing its sockets: ``SyncGroup`` is the
only owner of the torch objects, and nothing else, an exception's traceback included, may keep them alive.
"""

import ipaddress
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them, but not for type checkers
from torch.distributed import distributed_c10d

from megatron_rl.system.stores import listening_store
from megatron_rl.weights.buckets import Bucket
from megatron_rl.weights.plan import GroupSpec
from megatron_rl.weights.server_calls import ServerCallError
from megatron_rl.weights.side_streams import side_stream

MAX_CONNECT_S = 60.0
"""Joining takes well under a second once everybody is there. A server that waits for a missing one serves nothing."""


class SyncGroup:
    """The source rank's end of one group. Opened once, closed once; it listens for the workers from the start."""

    def __init__(self, spec: GroupSpec, address: str | None = None) -> None:
        """``address``: where servers reach this process; None: the local address of the route towards them.

        It listens there only. Raises OSError where there is no such route, or the address is not this machine's.
        """
        self.spec = spec
        self.address = address or _local_address_towards([server.url for server in spec.servers])
        self.connect_timeout_s = min(spec.timeout_s, MAX_CONNECT_S)
        # A free port, and never the one an earlier group may still occupy.
        self._store: TCPStore | None = listening_store(
            self.address, world_size=spec.world_size, timeout_s=self.connect_timeout_s
        )
        self.port = self._store.port
        self._process_group: dist.ProcessGroup | None = None
        self._closed = False

    def join_bodies(self) -> list[dict]:
        """What each server is asked at /init_weights_update_group."""
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
        """Wait until all workers joined; raises ServerCallError. May run in a thread of its own."""
        world_size, store, self._store = self.spec.world_size, self._store, None
        if store is None:
            raise RuntimeError(f"the group {self.spec.name} was opened before: make a new one")
        failure = ""
        try:
            # torch's public API has no group that spans processes outside the default group. SGLang makes the
            # servers' end with these same two calls.
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
            self._process_group.set_timeout(timedelta(seconds=self.spec.timeout_s))
        except RuntimeError as error:
            failure = _first_sentence(error)
        if self._closed:
            self._destroy()  # the caller gave up before the group came about
        if failure:
            raise ServerCallError(
                f"the trainer waited {self.connect_timeout_s:g} s for {world_size - 1} server workers to join the "
                f"weight sync group: {failure}"
            )

    def broadcast(self, bucket: Bucket) -> None:
        """Send the bucket to all workers; blocks until sent, raises ServerCallError. May run in a thread of its own."""
        failure, side = "", side_stream(bucket.flat.device, "send")
        try:
            with side.active(after=bucket.ready):
                dist.broadcast(bucket.flat, group_src=0, group=self._process_group)
            side.wait()
        except RuntimeError as error:
            failure = _first_sentence(error)
        if failure:
            raise ServerCallError(f"the broadcast of {bucket.num_bytes} bytes failed: {failure}")

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
    """Where the bytes of a broadcast must be."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _local_address_towards(urls: list[str]) -> str:
    """This machine's address on the route to the servers; one that is not loopback if any of them is elsewhere."""
    addresses = []
    for url in urls:
        parts = urlsplit(url)
        family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket only looks up the route, nothing is sent
            addresses.append(probe.getsockname()[0])
    elsewhere = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return (elsewhere or addresses)[0]


def _first_sentence(error: RuntimeError) -> str:
    """Gloo follows what happened with advice that does not fit here."""
    return str(error).partition(". ")[0]
