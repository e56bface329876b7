"""One trainer rank: its engines and its caches, and how it serves the driver's calls (``trainer_group.py``)."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.schema import Config
from megatron_rl.parallel import collectives, hang_report
from megatron_rl.parallel.array_server import Reachability
from megatron_rl.parallel.collectives import Payload
from megatron_rl.parallel.topology import ReplicaRanks, Topology
from megatron_rl.system.processes import process_probe
from megatron_rl.training.engine import Engine
from megatron_rl.training.export import WeightExport
from megatron_rl.training.image_cache import ImagePatcher
from megatron_rl.training.profiling import stage_profiler
from megatron_rl.training.sequence_cache import CachesByStep, RankBatch
from megatron_rl.training.stage_resources import StageKey, StageMeter


@dataclass(frozen=True)
class Call:
    """The one message from the driver to the ranks: a function that each of them runs. Pickled."""

    name: str
    """The call's name in messages."""
    function: Callable[..., Any]
    """A module's function, or a partial of one: ``function(rank, engine, batch)``, or ``function(rank)`` without an engine."""
    engine: str = ""
    """Empty: the call concerns no engine."""
    columns: Mapping[str, int] | None = None
    """The fields of the call's batch, as numbers of columns; None: there is no batch."""
    step: int | None = None
    """The step of the batch; None: the ranks cache nothing of it."""
    gathers: bool = False
    """The function gives a 1-D tensor on output ranks and None on others; the driver gets the tensors by replica."""
    stage: StageKey | None = None
    """The stage that the ranks work for."""

    def __str__(self) -> str:
        return f"{self.name} of the engine {self.engine}" if self.engine else self.name


class TrainerRank:
    """The engines of one rank by name, and all that their calls need."""

    def __init__(self, config: Config, topology: Topology, engines: Mapping[str, Engine]) -> None:
        self.config = config
        self.topology = topology
        self.engines = engines
        self.export = WeightExport(config)
        self.caches = CachesByStep(ImagePatcher(config.policy.path, [engine.hf_config for engine in engines.values()]))
        self.use = StageMeter()
        self._profiler = stage_profiler(config, topology.rank)
        self.replicas = {name: ReplicaRanks.of(e.parallel, topology.world_size) for name, e in engines.items()}
        self.note: Callable[[str], None] = lambda text: None
        """Receives the progress of long work."""
        self.is_stopped = False
        """The driver makes no further calls."""

    def serve(self) -> None:
        """Run the driver's calls until it stops the ranks (every rank but 0)."""
        try:
            while not self.is_stopped:
                self._serve_one()
        except RuntimeError as error:
            if not collectives.is_lost_connection(error):
                raise
            # The rank that went away has said why, or was told to stop: a second account would only hide the first, and
            # a failure of this rank's own could be taken for it.
            sys.exit(0)
        finally:
            self.export.close()

    def _serve_one(self) -> None:
        process_probe.set_status("waits", "the driver's next command")
        call: Call = collectives.broadcast_object(None, what="its next command")
        process_probe.set_status("waits")
        if call.engine:
            self.start_stage(call.stage)
        self.execute(call)

    def start_stage(self, stage: StageKey | None) -> None:
        """Count what this rank uses from now on as the stage's."""
        if self._profiler is not None:
            self._profiler.start_stage(stage)
        self.use.start_stage(stage)

    def offload_others(self, name: str) -> None:
        """Every other engine leaves the device to this one; an empty name: all do."""
        for other, engine in self.engines.items():
            if other != name:
                engine.offload()

    def execute(
        self, call: Call, payloads: Sequence[Payload] | None = None, reaches: Sequence[Reachability] = ()
    ) -> Any:
        """Run this rank's part of ``call``. The driver has the replicas' ``payloads`` and ``reaches``, and gets the results."""
        if not call.engine:
            return call.function(self)
        self.offload_others(call.engine)
        engine, replicas = self.engines[call.engine], self.replicas[call.engine]
        with hang_report.track_activity(str(call)):
            batch = RankBatch()
            if call.columns is not None:
                what = f"the batches of the {call}"
                payload = collectives.scatter_payloads(payloads, replicas.replica_roots, engine.topology, reaches=reaches, what=what)
                batch = self.caches.of(engine.topology, engine.parallel, call.step).take(payload, call.columns)
            with self.use.working():
                result = call.function(self, engine, batch)
        if call.gathers:
            what = f"the results of the {call}"
            return collectives.gather_tensors(result, senders=replicas.reporters, what=what)
        return result
