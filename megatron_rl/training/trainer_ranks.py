"""The trainer ranks of a run: the driver on rank 0, the others serving it."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.parallel import collectives
from megatron_rl.parallel import topology as topologies
from megatron_rl.parallel.topology import Topology
from megatron_rl.system.processes import process_probe, run_processes
from megatron_rl.system.processes.gc_pauses import gc_disabled
from megatron_rl.system.processes.signals import StopSignals, die_with_parent, leave_signals_to_the_driver
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_rank import TrainerRank

BuildEngines = Callable[[Topology], Mapping[str, Engine]]


@contextmanager
def trainer_ranks(
    config: Config, build_engines: BuildEngines, signals: StopSignals | None = None
) -> Iterator[TrainerGroup | None]:
    """Yields the group on rank 0; on the other ranks it serves until the driver says stop, then yields None.

    ``signals``: those of the driver, for a run: it has more to do on one than to leave, and a folder where it says who it is.
    """
    die_with_parent()
    is_driver = os.environ.get("RANK", "0") == "0"
    process_probe.enable_probe(f"trainer rank {os.environ.get('RANK', '0')}")
    folder = Path(config.run.output_dir) if signals is not None else None
    signals = signals or StopSignals(config.run.stop_grace_s)
    with signals.handling_signals() if is_driver else nullcontext():
        topology = topologies.initialize(config.parallel, seed=config.run.seed)
        try:
            register_processes(topology, folder)
            with gc_disabled():
                rank = TrainerRank(config, topology, build_engines(topology))
            if topology.rank != 0:
                leave_signals_to_the_driver()
                rank.serve()
                yield None
                return
            group = TrainerGroup(rank)
            yield group
            group.stop()
        finally:
            topologies.destroy()


def register_processes(topology: Topology, folder: Path | None) -> None:
    """Say in the run's folder which processes the ranks are, for `doctor --hang`; None: this is no run."""
    everybody = collectives.gather_objects(run_processes.this_process(topology.rank), what="which processes the ranks are")
    if folder is None:
        return
    if everybody:
        run_processes.write_members(folder, everybody)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        run_processes.serve_probes(folder)
