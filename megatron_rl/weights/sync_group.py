"""The process group between a source rank of the trainer and the workers of the SGLang servers.

The group is independent of the trainer's own groups. A server waits up to 30 minutes inside a broadcast (SGLang's
default), so after a failure only the source can free the server, by closing its sockets. ``SyncGroup`` is therefore
the only owner of the torch objects; nothing else, also no exception's traceback, may keep them alive.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them, but not for type checkers
from torch.distributed import distributed_c10d

from megatron_rl.system.gpu.gpu_environment import nccl_values
from megatron_rl.system.http.addresses import address_towards_all
from megatron_rl.system.processes.torch_store import listening_store
from megatron_rl.weights.bucket_plan import GroupSpec
from megatron_rl.weights.buckets import Bucket, side_stream
from megatron_rl.weights.server_calls import ServerCallError

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
