"""Weights on their way from the Megatron ranks to the servers: which rank does what.

``WeightExport`` is every rank's part, ``ServedWeights`` the driver's. With servers of their own devices the first rank of
each pipeline stage sends its stage's tensors; with servers on the trainer's devices every rank holds every tensor for
the server worker beside it; through files rank 0 writes all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_rl.config.schema import Config, Placement, WeightSync
from megatron_rl.models.hf.weights import Destination
from megatron_rl.parallel import collectives
from megatron_rl.parallel.topology import Topology
from megatron_rl.training.engine import Engine
from megatron_rl.weights import colocated
from megatron_rl.weights.buckets import take_part
from megatron_rl.weights.plan import ServerAddress
from megatron_rl.weights.publish import PublishResult, WeightPublisher
from megatron_rl.weights.sources import StageRank

if TYPE_CHECKING:
    from megatron_rl.training.group import TrainerGroup


class WeightExport:
    """A rank's part while the driver sends weights; keeps the rank's group with the servers."""

    def __init__(self, config: Config) -> None:
        self._bucket_bytes = config.rollout.bucket_bytes
        self._timeout_s = patience_s(config)
        self._stage: StageRank | None = None

    def take_part(self, engine: Engine, to: Destination) -> None:
        """Walk the engine's stream and do with it what ``to`` asks of this rank (any but rank 0)."""
        stream, topology = engine.export_weights(to), engine.topology
        if to is Destination.everywhere:
            colocated.follow(stream, self._bucket_bytes, topology.device, ControlRanks(self._timeout_s))
        elif to is Destination.stage and topology.rank in source_ranks(topology):
            if self._stage is None:
                self._stage = StageRank(ControlLink(0, self._timeout_s), self._bucket_bytes)
            self._stage.serve(stream, topology.device)
        else:
            take_part(stream)

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()


class ServedWeights:
    """What the servers get: one model of the trainer, by the way that the configuration names (the driver's side)."""

    def __init__(self, config: Config, group: "TrainerGroup", engine: str) -> None:
        self._group = group
        self._engine = engine
        self._rollout = config.rollout
        self._timeout_s = patience_s(config)

    @property
    def expected(self) -> Mapping[str, Sequence[int]]:
        """Hugging Face name -> shape of every tensor that the servers have."""
        return self._group.expected_weights(self._engine)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors on this rank, one after the other; collective, to be walked to its end."""
        return self._group.export_weights(self._engine)

    def publish(self, publisher: WeightPublisher, servers: Sequence[ServerAddress], version: int) -> PublishResult:
        """Collective over the trainer ranks. Raises WeightSyncError."""
        options: dict[str, Any] = {"expected": self.expected}
        destination = Destination.stage
        if self._rollout.placement is Placement.colocated:
            destination, options["ranks"] = Destination.everywhere, ControlRanks(self._timeout_s)
        elif self._rollout.weight_sync is WeightSync.disk:
            destination = Destination.driver
        else:
            ranks = source_ranks(self._group.topology_of(self._engine))[1:]
            options["links"] = [ControlLink(rank, self._timeout_s) for rank in ranks]
        return publisher.publish(self._group.export_weights(self._engine, destination), servers, version, **options)

    def free_memory(self) -> None:
        """Give what the ranks' allocators hold unused back to their devices: the servers beside them need it."""
        self._group.free_memory()


def source_ranks(topology: Topology) -> list[int]:
    """The first rank of each pipeline stage."""
    return [stage * (topology.world_size // topology.pp_size) for stage in range(topology.pp_size)]


def patience_s(config: Config) -> float:
    """How long ranks wait for each other inside a publish: longer than its longest wait for a server."""
    return config.parallel.collective_timeout_s + 2 * config.rollout.weight_sync_timeout_s


class ControlLink:
    """Messages to and from one rank on the control plane."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self._timeout_s = timeout_s

    def send(self, message: Any) -> None:
        collectives.send_object(message, self.rank, what=_WHAT, timeout_s=self._timeout_s)

    def receive(self) -> Any:
        return collectives.receive_object(self.rank, what=_WHAT, timeout_s=self._timeout_s)


class ControlRanks:
    """What all ranks say to each other on the control plane (``colocated.Ranks``)."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def gather(self, handle: str) -> list[str]:
        return collectives.gather_objects(handle, what=_WHAT, timeout_s=self._timeout_s)

    def agree(self, go_on: bool) -> bool:
        return collectives.broadcast_object(go_on, what=_WHAT, timeout_s=self._timeout_s)


_WHAT = "word on the weight sync"


def free_cached_memory() -> None:
    """This rank's unused device memory, back to the device; nothing on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
