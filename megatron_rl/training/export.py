"""Weights on their way from the Megatron ranks to the servers: which rank does what.

``WeightExport`` is every rank's part; the driver's is ``rollout/served_weights.py``. With servers of their own devices the first rank of
each pipeline stage sends its stage's tensors; with servers on the trainer's devices every rank holds every tensor for
the server worker beside it; through files rank 0 writes all of them.
"""

from typing import Any

import torch

from megatron_rl.config.schema import Config
from megatron_rl.models.hf.weights import Destination
from megatron_rl.parallel import collectives
from megatron_rl.parallel.topology import Topology
from megatron_rl.training.engine import Engine
from megatron_rl.weights import colocated
from megatron_rl.weights.buckets import take_part
from megatron_rl.weights.senders import StageRank


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
