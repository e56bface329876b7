"""Each rank's part in sending weights from the Megatron ranks to the servers.

``WeightExport`` is the part of every rank; the driver's part is ``rollout/weight_sources.py``. With servers on
separate devices the first rank of each pipeline stage sends its stage's tensors; with servers on the trainer's
devices every rank has every tensor for the server worker on its device; with files rank 0 writes all tensors.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.derived import bucket_bytes
from megatron_rl.config.schema import Config
from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.parallel import collectives
from megatron_rl.parallel.topology import Topology, local_device
from megatron_rl.training.engine import Engine
from megatron_rl.weights.bucket_plan import Coverage
from megatron_rl.weights.buckets import exhaust
from megatron_rl.weights.colocated import RankMessaging, follow
from megatron_rl.weights.source_ranks import Channel, StageRank

_WHAT = "word on the weight sync"


class WeightExport:
    """A rank's part in a publish; keeps the rank's process group with the servers."""

    def __init__(self, config: Config) -> None:
        self._bucket_bytes = bucket_bytes(config.rollout, local_device().type)
        self._timeout_s = rank_timeout_s(config)
        self._stage: StageRank | None = None

    def run(self, engine: Engine, to: GatherTarget, *, merged: bool) -> None:
        """Exhaust the engine's stream and send its tensors as ``to`` says; for every rank but 0. ``merged``: with its adapters."""
        stream, topology = engine.export_weights(to, merged=merged), engine.topology
        if to is GatherTarget.everywhere:
            ranks, coverage = control_ranks(self._timeout_s), Coverage(engine.expected_weights())
            follow(whole(stream), self._bucket_bytes, topology.device, ranks, coverage)
        elif to is GatherTarget.stage and topology.rank in source_ranks(topology):
            if self._stage is None:
                driver = os.environ.get("MASTER_ADDR", "")
                self._stage = StageRank(control_channel(0, self._timeout_s), self._bucket_bytes, driver=driver)
            self._stage.serve(whole(stream), topology.device)
        else:
            # This rank sends nothing, but its shards are gathered inside the stream.
            exhaust(stream)

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()


def whole(weights: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    """The stream of a rank that gets every tensor (``GatherTarget``). Raises ValueError for a tensor that is on another rank."""
    for name, tensor in weights:
        if tensor is None:
            raise ValueError(f"{name} was assembled on another rank: this one does not send it")
        yield name, tensor


def exhausting(
    weights: Iterator[tuple[str, Tensor | None]], working: AbstractContextManager[None]
) -> Iterator[tuple[str, Tensor]]:
    """``whole`` inside the block ``working``; completes the gathers even if the caller leaves it early."""
    try:
        # Not "yield from": closing this generator must not close ``weights`` before its gathers are complete.
        with working:
            for item in whole(weights):  # noqa: UP028
                yield item
    finally:
        exhaust(weights)


def source_ranks(topology: Topology) -> list[int]:
    """The first rank of each pipeline stage."""
    # Ranks are numbered stage by stage.
    return [stage * (topology.world_size // topology.pp_size) for stage in range(topology.pp_size)]


def rank_timeout_s(config: Config) -> float:
    """Timeout of ranks that wait for each other inside a publish: longer than its longest wait for a server."""
    return config.parallel.collective_timeout_s + 2 * config.rollout.weight_sync_timeout_s


def control_channel(rank: int, timeout_s: float) -> Channel:
    """Messages to and from one rank on the control plane."""
    return Channel(
        rank,
        send=partial(collectives.send_object, peer=rank, what=_WHAT, timeout_s=timeout_s),
        receive=partial(collectives.receive_object, rank, what=_WHAT, timeout_s=timeout_s),
    )


def control_ranks(timeout_s: float) -> RankMessaging:
    """Message passing between all ranks on the control plane."""
    options: dict[str, Any] = {"what": _WHAT, "timeout_s": timeout_s}
    return RankMessaging(
        rank=torch.distributed.get_rank(),
        tell=partial(collectives.broadcast_object, **options),
        report=partial(collectives.gather_objects, **options),
        send=partial(collectives.send_object, **options),
        receive=partial(collectives.receive_object, **options),
    )


def free_cached_memory() -> None:
    """Return this rank's unused device memory to the device; does nothing on a CPU."""
    if torch.cuda.is_available():
        # First, because memory that a server has closed returns to the cache only here.
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
