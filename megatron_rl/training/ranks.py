"""The trainer ranks of a run: the driver on rank 0, the others serving it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from megatron_rl.config.schema import (
    Config,
)
from megatron_rl.parallel import topology as topologies
from megatron_rl.parallel.topology import Topology
from megatron_rl.system.signals import clean_stop, die_with_parent, leave_signals_to_the_driver
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_group import TrainerGroup, Worker

BuildEngines = Callable[[Topology], Mapping[str, Engine]]


@contextmanager
def trainer_ranks(config: Config, build_engines: BuildEngines) -> Iterator[TrainerGroup | None]:
    """Yields the group on rank 0; on the other ranks it serves until the driver says stop, then yields None."""
    die_with_parent()
    topology = topologies.initialize(config.parallel, seed=config.run.seed)
    try:
        worker = Worker(config, topology, build_engines(topology))
        if topology.rank != 0:
            leave_signals_to_the_driver()
            worker.serve()
            yield None
            return
        with clean_stop():
            group = TrainerGroup(worker)
            yield group
            group.stop()
    finally:
        topologies.destroy()
