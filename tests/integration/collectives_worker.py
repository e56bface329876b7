"""Run by torchrun from ``test_collectives.py``; writes what this rank saw to ``argv[1]/RANK.pt``.

The last checks end the world: time-outs, then the end of rank 1 while rank 0 waits for it.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.rows import Rows
from megatron_rl.parallel import collectives, topology
from megatron_rl.parallel import hang_report as progress
from megatron_rl.parallel.array_server import Reachability, start_array_server
from megatron_rl.system.files.shared_file import SharedArrays


def payload_for(replica: int) -> dict[str, torch.Tensor]:
    """Other names, lengths and dtypes for each replica."""
    generator = torch.Generator().manual_seed(replica)
    return {
        "tokens": torch.randint(0, 2**40, (3 + replica,), generator=generator),
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(2, 3, generator=generator).bfloat16(),
        "nothing": torch.zeros(0, 4),
        "routes": torch.randint(-9, 9, (2, 3, 2), generator=generator, dtype=torch.int16),
        "scalar": torch.tensor(1.5 + replica, dtype=torch.float64),
        f"only_{replica}": torch.ones(1, dtype=torch.int32),
    }


def as_rows(payload: dict[str, torch.Tensor], shared: SharedArrays | None) -> dict[str, torch.Tensor | Rows]:
    """Tensors of more than one row as rows, each row in an array of its own, which other processes can map if it is ``shared``."""

    def rows(values: torch.Tensor) -> Rows:
        arrays = [part.numpy() for part in values.split(1)]
        return Rows.of([arrays if shared is None else [shared.put(array) for array in arrays]])

    names = ("tokens", "mask", "routes")
    return {name: rows(values) if name in names else values for name, values in payload.items()}


def joined(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The payload that arrived, its rows packed."""
    return {name: torch.from_numpy(v.packed()) if isinstance(v, Rows) else v for name, v in found.items()}


def exchange(parallel: ParallelConfig, ranks: topology.Topology) -> dict[str, Any]:
    seen: dict[str, Any] = {"topology": ranks}
    heads = topology.ReplicaRanks.of(parallel, ranks.world_size).replica_roots
    payloads = [payload_for(replica) for replica in range(ranks.dp_size)] if ranks.rank == 0 else None
    seen["payload"] = collectives.scatter_payloads(payloads, heads, ranks)
    own, shared = ([as_rows(one, where) for one in payloads or ()] or None for where in (None, SharedArrays()))
    service = start_array_server("127.0.0.1") if shared else None
    mapped, fetched = (Reachability(node, node == 0, {0: service}) for node in (0, -1))
    seen["copied"] = joined(collectives.scatter_payloads(own, heads, ranks, reaches=[fetched] * len(heads)))
    seen["mapped"] = joined(collectives.scatter_payloads(shared, heads, ranks, reaches=[mapped] * len(heads)))
    seen["fetched"] = joined(collectives.scatter_payloads(shared, heads, ranks, reaches=[fetched] * len(heads)))
    seen["object"] = collectives.broadcast_object({"step": 7} if ranks.rank == 1 else None, src=1)
    mine = None if ranks.rank == 1 else torch.full((ranks.rank,), ranks.rank, dtype=torch.int64)
    seen["gathered"] = collectives.gather_tensors(mine)
    start = time.monotonic()
    time.sleep(0.3 * ranks.rank)
    collectives.barrier()
    seen["barrier_s"] = time.monotonic() - start
    return seen


def take_turns(first: topology.Topology) -> list[Any]:
    """Megatron's (tensor, pipeline, data) sizes outside and inside of further layouts, nested and left by an error."""
    tensor = topology.add_layout(ParallelConfig(tensor_parallel_size=3), seed=1)
    pipeline = topology.add_layout(ParallelConfig(pipeline_parallel_size=3), seed=1)
    again = topology.add_layout(ParallelConfig(tensor_parallel_size=3, num_ranks=3, collective_timeout_s=9.0), seed=1)
    sizes = [_megatron_sizes()]
    with tensor.active():
        sizes.append(_megatron_sizes())
        with tensor.active(), pipeline.active():
            sizes.append(_megatron_sizes())
            with first.active():
                sizes.append(_megatron_sizes())
            sizes.append(_megatron_sizes())
        sizes.append(_megatron_sizes())
    try:
        with pipeline.active():
            raise KeyError
    except KeyError:
        sizes.append(_megatron_sizes())
    return [sizes, again is tensor]


def _megatron_sizes() -> tuple[int, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )


def main() -> None:
    rank = int(os.environ["RANK"])
    seen: list[Any] = []
    layouts = ParallelConfig(), ParallelConfig(tensor_parallel_size=3), ParallelConfig(pipeline_parallel_size=3)
    for parallel in layouts:
        seen.append(exchange(parallel, topology.initialize(parallel, seed=1)))
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == 3
        topology.destroy()

    progress.GRACE_S = 1.0
    place = topology.initialize(ParallelConfig(collective_timeout_s=1.0), seed=1)
    seen.append(take_turns(place))
    try:
        with progress.track_activity("update of the engine critic"):
            if rank == 1:
                time.sleep(6.0)
            dist.all_reduce(torch.ones(1), group=parallel_state.get_data_parallel_group())
    except RuntimeError as error:
        seen.append(f"{type(error).__name__}: {error}")
    assert place.dp_size == 3
    topology.destroy()

    topology.initialize(ParallelConfig(), seed=1)
    if rank == 1:
        start = time.monotonic()
        try:
            collectives.receive_object(0, what="experience", timeout_s=0.5)
        except collectives.CollectiveTimeout as error:
            seen.append((time.monotonic() - start, str(error)))
    if rank == 0:
        try:
            collectives.gather_tensors(None, what="losses", timeout_s=30.0)
        except RuntimeError as error:
            seen.append(str(error))
    torch.save(seen, Path(sys.argv[1]) / f"{rank}.pt")
    # Neither a clean leave nor a Python exit: the peers see what they would see of a killed process.
    os._exit(0)


if __name__ == "__main__":
    main()
