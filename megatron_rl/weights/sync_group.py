"""The extra process group between a source rank of the trainer and the workers of the SGLang servers.

It stands next to the trainer's own groups and knows nothing of them. A server's end waits up to 30 minutes inside a
broadcast (SGLang's default), so what frees it after a failure is the source closing its sockets: ``SyncGroup`` is the
only owner of the torch objects, and nothing else, an exception's traceback included, may keep them alive.
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
from megatron_rl.weights.buckets import Bucket
from megatron_rl.weights.cuda_streams import side_stream
from megatron_rl.weights.server_calls import ServerCallError

MAX_CONNECT_S = 60.0
"""Joining takes well under a second once everybody is there. A server that waits for a missing one serves nothing."""
_AFTER_POLITE_ERROR_S = 60.0
_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""What torch reads when a group is made: on an error end the broadcast alone (ErrorHandlingMode, ProcessGroupNCCL.hpp), and write
no dump, after which the heartbeat's monitor would end the process."""


class SyncGroup:
    """The source rank's end of one group. Opened once, closed once; it listens for the workers from the start."""

    def __init__(self, spec: GroupSpec, *, driver: str = "") -> None:
        """It listens at the local address of the route towards the servers only.

        ``driver``: its machine, where it is another one: a server at 127.0.0.1 is there, not here.
        Raises OSError where there is no such route.
        """
        self.spec = spec
        self.address = address_towards_all([server.url for server in spec.servers], loopback_is=driver)
        self.connect_timeout_s = min(spec.timeout_s, MAX_CONNECT_S)
        # A free port, and never the one an earlier group may still occupy.
        self._store: TCPStore | None = listening_store(
            self.address, world_size=spec.world_size, timeout_s=self.connect_timeout_s
        )
        self.port = self._store.port
        self._process_group: dist.ProcessGroup | None = None
        self._closed = False

    @property
    def timeout_s(self) -> float:
        """Of a broadcast. The servers' HTTP answers are given up before NCCL's is: that error says which server it was."""
        return self.spec.timeout_s + (_AFTER_POLITE_ERROR_S if self.spec.backend == "nccl" else 0.0)

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
            with _watchdog_spares_the_process():
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
            self._destroy()  # the caller gave up before the group came about
        if failure:
            raise ServerCallError(
                f"the trainer waited {self.connect_timeout_s:g} s for {world_size - 1} server workers to join the "
                f"weight sync group: {failure}{_nccl_hint(self.spec.backend)}"
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
            # NCCL makes its communicator at the first broadcast, and only then the two sides show that they differ.
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
    """Where the bytes of a broadcast must be."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


@contextmanager
def _watchdog_spares_the_process() -> Iterator[None]:
    """A group made inside: when a broadcast fails, NCCL's watchdog ends the broadcast and not this process.

    By default a server that dies, or a bucket that takes too long, would take the trainer with it. The heartbeat stays: a
    watchdog that hangs itself is noticed.
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
    ours = " ".join(f"{name}={value}" for name, value in nccl_values(os.environ).items())
    return (
        f". Trainer and servers need the same values of NCCL's variables, and GPUs that no other process of the group has; here "
        f"{ours}: start servers with the same in their environment (SGLang takes 0 where they are not set)"
    )


def _first_sentence(error: RuntimeError) -> str:
    """Gloo follows what happened with advice that does not fit here."""
    return str(error).partition(". ")[0]
