"""Process groups and the coordinates of every rank.

Ranks are ordered as Megatron orders them: neighbours share a tensor-parallel group, then context-parallel, then
data-parallel, then pipeline. Expert parallelism takes its ranks from those of a pipeline stage.
Two worlds live side by side: Megatron's groups (NCCL on GPUs, gloo on CPUs) and one gloo group for control traffic,
which ``collectives.py`` uses. ``initialize`` blocks until every rank of the world has called it; a rank that does not
come within ``parallel.collective_timeout_s`` makes the others fail.

The same ranks may have several layouts (``add_layout``: a critic unlike its policy). Megatron's globals are those of
one layout at a time: the first one's, and inside ``with topology.active()`` that topology's. All ranks make their
layouts, and enter them, in the same order.
"""

import functools
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_rl.config.layout import expert_tensor_size, layout_problems, ranks_of_replica
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.errors import UserError
from megatron_rl.parallel import megatron_state
from megatron_rl.system.gpu.gpu_environment import check_required_gpus, set_gpu_defaults

_CONTROL_GROUP_TIMEOUT = timedelta(days=30)
"""Calls on the control group carry their own deadlines; the group's must not fire before them."""

_generations: Iterator[int] = itertools.count()
_control_plane: "ControlPlane | None" = None
_layouts: "list[_Layout]" = []
_active = 0
"""Index into ``_layouts`` of the layout whose variables Megatron's globals contain."""


@dataclass(frozen=True)
class Topology:
    """This rank's place: ranks count from 0 within their group."""

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
        """Megatron's globals are those of this layout inside; may be nested, and changes nothing where they are so."""
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
        """One rank of each data-parallel replica: where its log-probs and values are reported from."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0


class RankCoordinates(NamedTuple):
    """A rank's coordinates."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int


@dataclass(frozen=True)
class ReplicaRanks:
    """The ranks of a layout by data-parallel replica: those that compute on the same micro-batches."""

    of_ranks: tuple[int, ...]
    """Replica of each rank, by rank."""
    replica_roots: tuple[int, ...]
    """Replica root by replica: the rank that receives batches. The first rank, or the second one if the first is the driver."""
    reporters: tuple[int, ...]
    """Output rank by replica: the rank that reports the outputs; its tensor- and context-parallel peers have the same ones."""

    @classmethod
    def of(cls, parallel: ParallelConfig, num_ranks: int) -> "ReplicaRanks":
        places = [coordinates(rank, num_ranks, parallel) for rank in range(num_ranks)]

        def ranks_at(stage: int) -> tuple[int, ...]:
            """They come in the order of their replicas."""
            return tuple(rank for rank, place in enumerate(places) if place._replace(dp_rank=0) == (0, 0, 0, stage))

        of_ranks, stages = tuple(place.dp_rank for place in places), parallel.pipeline_parallel_size
        beside_driver = [rank for rank in range(1, num_ranks) if of_ranks[rank] == 0]
        heads = (*(beside_driver or [0])[:1], *ranks_at(0)[1:])
        return cls(of_ranks, heads, ranks_at(stages - 1))


@dataclass
class _Layout:
    parallel: ParallelConfig
    topology: Topology
    variables: megatron_state.Capture
    """Megatron's globals; those of the active layout are in use and may be newer."""


@dataclass(frozen=True)
class ControlPlane:
    group: dist.ProcessGroup
    timeout_s: float
    store: Store
    """Keys and values that all ranks see, of this world alone."""


def coordinates(rank: int, world_size: int, parallel: ParallelConfig) -> RankCoordinates:
    """The place of ``rank``; raises ValueError when the layout excludes itself or the world does not fit it."""
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

    Without RANK in the environment this process is a world of its own. ``seed`` seeds Megatron's generators. After
    ``destroy`` it may be called again, with another layout too. Errors: ValueError for a layout that does not fit, UserError
    where a GPU is required and none is there or NCCL does not connect the ranks, RuntimeError when called twice, and torch's
    time-out error when a rank stays away.
    """
    global _control_plane
    if dist.is_initialized():
        raise RuntimeError("the process groups exist already; call topology.destroy() before another initialize()")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    coordinates(rank, world_size, parallel)
    timeout = timedelta(seconds=parallel.collective_timeout_s)
    on_gpu = torch.cuda.is_available()
    check_required_gpus(int(on_gpu))
    if on_gpu:
        set_gpu_defaults()  # also for ranks that srun or torchrun started without the launch scripts
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # A prefix of its own for each world: keys of an earlier one would be taken for live addresses.
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
    """Make NCCL's communicator of all ranks, which takes all of them; later, pairs send to each other through it. UserError."""
    try:
        dist.all_reduce(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise UserError(
            f"the trainer's ranks do not reach each other over NCCL: {str(error).strip().splitlines()[-1]}. NCCL_DEBUG=INFO says "
            "more; each rank needs a GPU of its own, and NCCL an interface that all nodes reach (docs/cluster.md, The network)"
        ) from error


def add_layout(parallel: ParallelConfig, *, seed: int) -> Topology:
    """Another layout of this world's ranks, all of which call it; ``seed`` as for ``initialize``.

    A layout that is there already, but for its number of ranks and its time-out, is given back and shares its groups.
    ValueError for one that does not fit.
    """
    global _active
    for known in _layouts:
        if _same_layout(known.parallel, parallel):
            return known.topology
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
    # Megatron refuses to make groups where some are: the ones in use are put aside first.
    if _layouts:
        _layouts[_active].variables = megatron_state.save_globals()
    megatron_state.reset_globals()
    _initialize_megatron(parallel, seed)
    previous, _active = _active, topology.layout
    _layouts.append(_Layout(parallel, topology, megatron_state.save_globals()))
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
    """Make Megatron's groups and generators of one layout; its globals are those of none before."""
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
        # Copies of the data-parallel groups for optimizer states that travel through the host, which none does here; gloo
        # connects all pairs of each at once, NCCL's groups connect when they are used.
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _switch_to(layout: int) -> None:
    global _active
    if layout == _active:
        return
    _layouts[_active].variables = megatron_state.save_globals()
    megatron_state.load_globals(_layouts[layout].variables)
    _active = layout


def destroy() -> None:
    """Leave the world and forget its groups; every rank calls it. Without a world it does nothing."""
    global _control_plane, _active
    _control_plane = None
    if not dist.is_initialized():
        return
    # Megatron destroys the groups of its globals alone, so each layout's have to be in place.
    for layout in reversed(_layouts):
        _switch_to(layout.topology.layout)
        parallel_state.destroy_model_parallel()
    _layouts.clear()
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
    """The world's key-value store, met once in a process: rank 0's server keeps its port."""
    if "RANK" not in os.environ:
        return dist.HashStore()  # type: ignore[attr-defined]  # torch has it, but does not say so
    store, _, _ = next(rendezvous("env://"))
    return store
