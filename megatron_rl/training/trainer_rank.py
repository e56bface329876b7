"""One trainer rank: its engines and caches, how it serves the driver's calls (``trainer_group.py``), and their functions."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch, select_spans
from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.parallel import collectives, hang_report
from megatron_rl.parallel.array_server import Reachability
from megatron_rl.parallel.collectives import Payload
from megatron_rl.parallel.topology import ReplicaRanks, Topology
from megatron_rl.system.processes import process_probe
from megatron_rl.training import losses
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.export import WeightExport, free_cached_memory
from megatron_rl.training.model_checkpoint import CheckpointError, CheckpointSaveError
from megatron_rl.training.profiling import StageKey, StageMeter, stage_profiler
from megatron_rl.training.sequence_cache import ImagePatcher, SequenceCache


@dataclass(frozen=True)
class Call:
    """The one message from the driver to the ranks: a function that each of them runs. Pickled."""

    name: str
    """The call's name in messages."""
    function: Callable[..., Any]
    """A module's function, or a partial of one: ``function(rank, engine, microbatches)``, or ``function(rank)`` without an engine."""
    engine: str = ""
    """Name of the engine; empty if the call concerns none."""
    columns: Mapping[str, int] | None = None
    """Maps each field of the call's batch to the number of its column; None: there is no batch."""
    step: int | None = None
    """The step of the batch; None: the ranks cache nothing of it."""
    gathers: bool = False
    """True if the function returns a 1-D tensor on output ranks and None on others; the driver gets the tensors by replica."""
    stage: StageKey | None = None
    """Stage to which the ranks attribute their resources."""

    def __str__(self) -> str:
        return f"{self.name} of the engine {self.engine}" if self.engine else self.name


class TrainerRank:
    """The engines of one rank by name, with the state that their calls share."""

    def __init__(self, config: Config, topology: Topology, engines: Mapping[str, Engine]) -> None:
        self.config = config
        self.topology = topology
        self.engines = engines
        self.export = WeightExport(config)
        self._caches: dict[tuple[int, int], SequenceCache] = {}
        """The cache of each layout and step."""
        self._patcher = ImagePatcher(config.policy.path, [engine.hf_config for engine in engines.values()])
        self.use = StageMeter()
        self._profiler = stage_profiler(config, topology.rank)
        self.replicas = {name: ReplicaRanks.of(e.parallel, topology.world_size) for name, e in engines.items()}
        self.note: Callable[[str], None] = lambda text: None
        """Receives the progress of long work."""
        self.is_stopped = False
        """True once the driver makes no further calls."""

    def serve(self) -> None:
        """Run the driver's calls until it stops the ranks (every rank but 0)."""
        try:
            while not self.is_stopped:
                self._serve_one()
        except RuntimeError as error:
            if not collectives.is_lost_connection(error):
                raise
            # The lost rank has reported its error, or was told to stop. A second report would only hide the first, and could be
            # mistaken for a failure of this rank.
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
        """Attribute the resources that this rank uses from now on to the stage."""
        if self._profiler is not None:
            self._profiler.start_stage(stage)
        self.use.start_stage(stage)

    def offload_others(self, name: str) -> None:
        """Offload every engine but this one, and but the weights that it shares with others; an empty name: every engine."""
        used = self.engines[name].memory if name else None
        for engine in self.engines.values():
            if engine.memory is not used:
                engine.offload(keep_weights=used is not None and engine.memory is used.base)

    def cache_of(self, engine: Engine, step: int | None) -> SequenceCache:
        """The cache of the engine's layout and a step; ``step`` None: a cache for one call."""
        key = engine.topology.layout, -1 if step is None else step
        found = self._caches.get(key) or SequenceCache(self._patcher.share_of(engine.topology, engine.parallel))
        if step is not None:
            self._caches[key] = found
        return found

    def release(self, step: int | None) -> None:
        """Drop the cached sequences of ``step``; None: of every step."""
        for key in [key for key in self._caches if step in (None, key[1])]:
            self._caches.pop(key).images.drop()

    def execute(
        self, call: Call, payloads: Sequence[Payload] | None = None, reaches: Sequence[Reachability] = ()
    ) -> Any:
        """Run this rank's part of ``call``. The driver has the replicas' ``payloads`` and ``reaches``, and gets the results."""
        if not call.engine:
            return call.function(self)
        self.offload_others(call.engine)
        engine, replicas = self.engines[call.engine], self.replicas[call.engine]
        with hang_report.track_activity(str(call)):
            batch: list[PackedBatch] = []
            if call.columns is not None:
                what = f"the batches of the {call}"
                payload = collectives.scatter_payloads(payloads, replicas.replica_roots, engine.topology, reaches=reaches, what=what)
                batch = self.cache_of(engine, call.step).take(payload, call.columns)
            with self.use.working():
                result = call.function(self, engine, batch)
        if call.gathers:
            what = f"the results of the {call}"
            return collectives.gather_tensors(result, senders=replicas.reporters, what=what)
        return result


# Below are the functions of the driver's calls. ``batch``: this rank's micro-batches; a call without a batch has none.


def logprobs(
    rank: TrainerRank,
    engine: Engine,
    batch: list[PackedBatch],
    *,
    temperature: float,
    step: int | None,
    answer: int,
    routes: int | None,
) -> Tensor | None:
    """The cache of ``step`` keeps the log-probs as the column ``answer``, and the chosen experts as the column ``routes``."""
    logprobs = _in_host_memory(engine.logprobs(batch, temperature=temperature, record_routes=routes is not None))
    cache = rank.cache_of(engine, step)
    cache.keep(answer, batch, logprobs)
    if routes is not None:
        # Most models have few enough experts for half the bytes.
        fits = (engine.chunks[0].config.num_moe_experts or 0) < torch.iinfo(torch.uint8).max
        cache.keep(routes, batch, [part.to(torch.uint8 if fits else torch.int16) for part in engine.pop_routes()])
    return _joined(engine, _for_the_driver(batch, logprobs))


def values(rank: TrainerRank, engine: Engine, batch: list[PackedBatch]) -> Tensor | None:
    found = engine.values(batch)
    values = _for_the_driver(batch, [values for values, _ in found])
    return _joined(engine, [part for (_, final), own in zip(found, values, strict=True) for part in (own, final)])


def update(
    rank: TrainerRank,
    engine: Engine,
    batch: list[PackedBatch],
    *,
    objective: str,
    denominators: dict[str, float],
    temperature: float,
    keeps_logprobs: bool,
) -> UpdateResult:
    loss = losses.build(objective, rank.config.algorithm, denominators, is_own_old=keeps_logprobs)
    return engine.update(batch, loss, temperature=temperature, keeps_logprobs=keeps_logprobs)


def pop_logprobs(rank: TrainerRank, engine: Engine, batch: list[PackedBatch]) -> Tensor | None:
    return _joined(engine, engine.pop_logprobs())


def export(rank: TrainerRank, engine: Engine, batch: list[PackedBatch], *, to: GatherTarget, merged: bool) -> None:
    rank.export.run(engine, to, merged=merged)


def export_adapters(rank: TrainerRank, engine: Engine, batch: list[PackedBatch]) -> dict[str, Tensor]:
    return engine.export_adapters()


def save_hf(rank: TrainerRank, engine: Engine, batch: list[PackedBatch], *, folder: str) -> None:
    engine.save_hf(folder, rank.note)


def save_state(rank: TrainerRank, engine: Engine, batch: list[PackedBatch], *, folder: str) -> None:
    with _raise_on_driver(rank):
        engine.save_state(folder)


def start_save(rank: TrainerRank, engine: Engine, batch: list[PackedBatch], *, folder: str) -> None:
    with _raise_on_driver(rank):
        engine.start_save(folder, in_background=True)


def load_state(rank: TrainerRank, engine: Engine, batch: list[PackedBatch], *, folder: str) -> None:
    with _raise_on_driver(rank):
        engine.load_state(folder)


def heartbeat(rank: TrainerRank) -> None:
    """Do nothing: a rank that has received the call waits for the next one with a full deadline."""


def free_memory(rank: TrainerRank) -> None:
    """Free the device for the servers on it: offload all models and return the allocators' unused memory."""
    rank.offload_others("")
    free_cached_memory()


def report_use(rank: TrainerRank) -> list[Any]:
    """Report to the driver what each stage used on this rank since the last report. Collective."""
    rank.start_stage(None)
    return collectives.gather_objects(rank.use.take(), what="what the ranks used")


def report_saves(rank: TrainerRank) -> list[bool]:
    """Report to the driver if all that this rank saves in the background is written. Collective."""
    written = all(engine.save_is_complete for engine in rank.engines.values())
    return collectives.gather_objects(written, what="whether its checkpoint is written")


def finish_saves(rank: TrainerRank) -> None:
    """Finish the checkpoints that are saved in the background."""
    problems = []
    for engine in rank.engines.values():
        try:
            engine.finish_save()
        except CheckpointSaveError as error:
            problems.append(str(error))  # other engines' saves must be finished, too
    if problems and rank.topology.rank == 0:
        raise CheckpointSaveError("; ".join(problems))


def release(rank: TrainerRank, *, step: int | None) -> None:
    """Drop the cached sequences of ``step``; None: of every step."""
    rank.release(step)


def stop(rank: TrainerRank) -> None:
    """Leave ``TrainerRank.serve``."""
    rank.is_stopped = True


@contextmanager
def _raise_on_driver(rank: TrainerRank) -> Iterator[None]:
    """Raise errors about a checkpoint on the driver alone: all ranks have the same error, and the driver decides how to continue."""
    try:
        yield
    except (CheckpointError, CheckpointSaveError):
        if rank.topology.rank == 0:
            raise


def _for_the_driver(batch: list[PackedBatch], parts: Sequence[Tensor]) -> list[Tensor]:
    """The spans of each micro-batch's values [T]; ranks before the last stage have no values."""
    return [select_spans(microbatch, part) for microbatch, part in zip(batch, parts, strict=False)]


def _in_host_memory(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors [n, ...] in host memory, by one copy, because each copy waits for the device."""
    return torch.cat(list(parts)).cpu().split([len(part) for part in parts]) if parts else parts


def _joined(engine: Engine, parts: Sequence[Tensor]) -> Tensor | None:
    """The result of an output rank: its parts, concatenated, in host memory."""
    if not engine.is_output_rank:
        return None
    return torch.cat(list(parts)).cpu() if parts else torch.zeros(0)
