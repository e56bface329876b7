"""Process groups and the coordinates of every rank.

Ranks have Megatron's order: adjacent ranks share a tensor-parallel group, then context-parallel, then data-parallel, then
pipeline. Expert parallelism uses the ranks of a pipeline stage. There are Megatron's groups (NCCL on GPUs, gloo on CPUs) and one
gloo group for control traffic (``collectives.py``). ``initialize`` blocks until every rank of the world has called it; if a rank
does not within ``parallel.collective_timeout_s``, the others fail.

The same ranks may have several layouts (``add_layout``: a critic unlike its policy). Megatron has one layout in module variables,
here those of the first layout, and inside ``with topology.active()`` those of that topology. All ranks create and activate
layouts in the same order.
"""

import functools
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_rl.config.layout import expert_tensor_size, layout_problems, ranks_of_replica
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.errors import UserError
from megatron_rl.system.gpu.gpu_environment import check_required_gpus, set_gpu_defaults

_CONTROL_GROUP_TIMEOUT = timedelta(days=30)
"""Calls on the control group have their own deadlines, which must be earlier than the group's timeout."""

_generations: Iterator[int] = itertools.count()
_control_plane: "ControlPlane | None" = None
_layouts: "list[tuple[ParallelConfig, Topology]]" = []
_active = 0
"""Index into ``_layouts`` of the layout whose variables Megatron's globals contain."""
_saved_globals: dict[int, dict[str, Any]] = {}
"""Layout -> Megatron's globals by name, as they were when another layout became active."""

_SHARED_BUFFERS = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER")
"""Globals that only save memory: they belong to no layout."""
_GLOBALS = {
    parallel_state: [
        name
        for name in vars(parallel_state)
        if name == "_global_process_group_list" or (re.fullmatch(r"_[A-Z][A-Z_]+", name) and name not in _SHARED_BUFFERS)
    ],
    megatron_random: ["_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"],
}
"""The variables in which Megatron keeps its one layout."""


@dataclass(frozen=True)
class Topology:
    """This rank's coordinates: ranks count from 0 within their group."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    cp_rank: int = 0
    cp_size: int = 1
    layout: int = 0
    """Index of this layout among the process's layouts."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make Megatron's globals those of this layout inside the block; may be nested."""
        previous = _active
        _switch_to(self.layout)
        try:
            yield
        finally:
            _switch_to(previous)

    def coordinates_of(self, rank: int) -> "RankCoordinates":
        """Coordinates of another rank in this layout."""
        return _place_of(rank, self.tp_size, self.cp_size, self.dp_size)

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_output_rank(self) -> bool:
        """True for one rank of each data-parallel replica, which reports the replica's log-probs and values."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0


class RankCoordinates(NamedTuple):
    """A rank's coordinates."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int


@dataclass(frozen=True)
class ReplicaRanks:
    """The ranks of a layout by data-parallel replica; ranks of a replica compute on the same micro-batches."""

    of_ranks: tuple[int, ...]
    """Replica of each rank, by rank."""
    replica_roots: tuple[int, ...]
    """Root of each replica, the rank that receives batches: the first rank, or the second if the first is the driver."""
    reporters: tuple[int, ...]
    """Output rank of each replica, which reports outputs; its tensor- and context-parallel peers have the same outputs."""

    @classmethod
    def of(cls, parallel: ParallelConfig, num_ranks: int) -> "ReplicaRanks":
        places = [coordinates(rank, num_ranks, parallel) for rank in range(num_ranks)]

        def ranks_at(stage: int) -> tuple[int, ...]:
            """First rank of the stage in each replica, in the order of the replicas."""
            return tuple(rank for rank, place in enumerate(places) if place._replace(dp_rank=0) == (0, 0, 0, stage))

        of_ranks, stages = tuple(place.dp_rank for place in places), parallel.pipeline_parallel_size
        beside_driver = [rank for rank in range(1, num_ranks) if of_ranks[rank] == 0]
        heads = (*(beside_driver or [0])[:1], *ranks_at(0)[1:])
        return cls(of_ranks, heads, ranks_at(stages - 1))


@dataclass(frozen=True)
class ControlPlane:
    group: dist.ProcessGroup
    timeout_s: float
    store: Store
    """Key-value store of this world's ranks."""


def coordinates(rank: int, world_size: int, parallel: ParallelConfig) -> RankCoordinates:
    """Coordinates of ``rank``; raises ValueError for an inconsistent layout, or one that does not fit the world."""
    problems = list(layout_problems(parallel, world_size))
    if problems:
        raise ValueError("; ".join(problems))
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is in [0, {world_size}), got {rank}")
    tp, cp = parallel.tensor_parallel_size, parallel.context_parallel_size
    dp = world_size // ranks_of_replica(parallel)
    return _place_of(rank, tp, cp, dp)


def _place_of(rank: int, tp: int, cp: int, dp: int) -> RankCoordinates:
    return RankCoordinates(rank % tp, rank // tp % cp, rank // (tp * cp) % dp, rank // (tp * cp * dp))


def initialize(parallel: ParallelConfig, *, seed: int) -> Topology:
    """Join the world that torchrun (or srun, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) describes.

    Without RANK in the environment this process is the whole world. ``seed`` seeds Megatron's generators. May be called again
    after ``destroy``, also with another layout. Raises ValueError for a layout that does not fit, UserError if a required GPU is
    missing or NCCL does not connect the ranks, RuntimeError when called twice, and torch's timeout error if a rank is missing.
    """
    global _control_plane
    if dist.is_initialized():
        raise RuntimeError("the process groups exist already; call topology.destroy() before another initialize()")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    # Checked before a group is created: a rank that fails later leaves the others waiting.
    coordinates(rank, world_size, parallel)
    timeout = timedelta(seconds=parallel.collective_timeout_s)
    on_gpu = torch.cuda.is_available()
    check_required_gpus(int(on_gpu))
    if on_gpu:
        set_gpu_defaults()  # here, because srun or torchrun may start ranks without the launch scripts
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # Each world has its own prefix, because an earlier world's keys would be taken for live addresses.
    store = PrefixStore(f"megatron_rl/{next(_generations)}", _rendezvous_store())
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    if on_gpu and world_size > 1:
        _init_nccl_world(torch.device("cuda"))
    topology = add_layout(parallel, seed=seed)
    group = dist.new_group(backend="gloo", timeout=_CONTROL_GROUP_TIMEOUT)
    _control_plane = ControlPlane(group=group, timeout_s=parallel.collective_timeout_s, store=store)
    return topology


def _init_nccl_world(device: torch.device) -> None:
    """Create NCCL's communicator of all ranks, collectively; later, pairs of ranks use it. Raises UserError."""
    try:
        dist.all_reduce(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise UserError(
            f"the trainer's ranks do not reach each other over NCCL: {str(error).strip().splitlines()[-1]}. NCCL_DEBUG=INFO says "
            "more; each rank needs a GPU of its own, and NCCL an interface that all nodes reach (docs/cluster.md, The network)"
        ) from error


def add_layout(parallel: ParallelConfig, *, seed: int) -> Topology:
    """Create a layout of this world's ranks, collectively; ``seed`` as for ``initialize``.

    Returns the existing layout if there is one with the same groups. Raises ValueError for a layout that does not fit.
    """
    global _active
    for known, topology in _layouts:
        if _same_layout(known, parallel):
            return topology
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = coordinates(rank, world_size, parallel)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        tp_rank=place.tp_rank,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=place.pp_rank,
        pp_size=parallel.pipeline_parallel_size,
        dp_rank=place.dp_rank,
        dp_size=world_size // ranks_of_replica(parallel),
        device=local_device(),
        cp_rank=place.cp_rank,
        cp_size=parallel.context_parallel_size,
        layout=len(_layouts),
    )
    # Megatron creates groups only if it has none, so the active layout's groups are saved first.
    if _layouts:
        _saved_globals[_active] = _megatron_globals()
    reset_globals()
    _initialize_megatron(parallel, seed)
    previous, _active = _active, topology.layout
    _layouts.append((parallel, topology))
    _switch_to(previous)
    return topology


def _same_layout(one: ParallelConfig, other: ParallelConfig) -> bool:
    def groups(parallel: ParallelConfig) -> ParallelConfig:
        return replace(
            parallel,
            num_ranks=0,
            collective_timeout_s=1.0,
            expert_tensor_parallel_size=expert_tensor_size(parallel),
            sequence_parallel=False,
            pipeline_layers=[],
        )

    return groups(one) == groups(other)


def _initialize_megatron(parallel: ParallelConfig, seed: int) -> None:
    """Create Megatron's process groups and random generators of one layout. The caller must call ``reset_globals`` first."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline_size if parallel.virtual_pipeline_size > 1 else None
        ),
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=expert_tensor_size(parallel),
        distributed_timeout_minutes=parallel.collective_timeout_s / 60,
        # Gloo copies of the data-parallel groups are only for optimizer states on the host, which are not used here, and gloo
        # would connect all pairs of ranks at once.
        create_gloo_process_groups=False,
    )
    megatron_random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _switch_to(layout: int) -> None:
    global _active
    if layout == _active:
        return
    _saved_globals[_active] = _megatron_globals()
    _set_globals(_saved_globals[layout])
    _active = layout


def _megatron_globals() -> dict[str, Any]:
    """Megatron's globals by name: references, so switching layouts copies nothing and needs no communication."""
    return {name: getattr(module, name) for module, names in _GLOBALS.items() for name in names}


def _set_globals(values: dict[str, Any]) -> None:
    for module, names in _GLOBALS.items():
        for name in names:
            setattr(module, name, values[name])


_UNINITIALIZED = _megatron_globals()


def reset_globals() -> None:
    """Reset Megatron's globals to their state before any initialization, which Megatron asserts."""
    _set_globals(_UNINITIALIZED)
    for name in _SHARED_BUFFERS:
        setattr(parallel_state, name, None)


def destroy() -> None:
    """Leave the world and destroy its groups, collectively; does nothing without a world."""
    global _control_plane, _active
    _control_plane = None
    if not dist.is_initialized():
        return
    # Megatron destroys only the groups in its globals, so each layout is activated first.
    for _, topology in reversed(_layouts):
        _switch_to(topology.layout)
        parallel_state.destroy_model_parallel()
    _layouts.clear()
    _saved_globals.clear()
    _active = 0
    dist.destroy_process_group()


def local_device() -> torch.device:
    """Device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def control_plane() -> ControlPlane:
    if _control_plane is None:
        raise RuntimeError("no process groups yet: call topology.initialize() first")
    return _control_plane


@functools.cache
def _rendezvous_store() -> Store:
    """Connect to the world's key-value store, once per process: cached, because rank 0's store server keeps its port."""
    if "RANK" not in os.environ:
        # A single process needs no server that other processes could connect to.
        return dist.HashStore()  # type: ignore[attr-defined]  # torch has it, but does not say so
    store, _, _ = next(rendezvous("env://"))
    return store
