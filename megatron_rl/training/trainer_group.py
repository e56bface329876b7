"""All trainer ranks as seen from the driver (rank 0): one call here, one collective action everywhere.

The other ranks sit in ``TrainerRank.serve`` and wait for the driver's next command; the driver sends it, sends each replica
what it lacks of its micro-batches (``sequence_cache.py``), takes part itself, and gathers what the output ranks report. An idle
driver sends heartbeats, so that a follower's deadline (parallel.collective_timeout_s) means a driver in trouble and
not a long generation.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data.batch import ROUTES, PackedBatch
from megatron_rl.families.flops import flops_cost
from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.parallel import collectives, hang_report
from megatron_rl.parallel.collectives import Payload
from megatron_rl.parallel.topology import ReplicaRanks, Topology
from megatron_rl.system.processes import process_probe
from megatron_rl.training import rank_methods
from megatron_rl.training.array_transport import ArrayTransport, Errand
from megatron_rl.training.batching import Plan
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.export import WeightExport, exhausting, free_cached_memory
from megatron_rl.training.image_cache import ImagePatcher
from megatron_rl.training.microbatch_io import restore
from megatron_rl.training.model_checkpoint import CheckpointSaveError
from megatron_rl.training.profiling import memory_note, stage_profiler
from megatron_rl.training.replica_assignment import PlacementPreferences, ReplicaPlanner
from megatron_rl.training.sequence_cache import About, CacheDirectory, CachesByStep, RankBatch
from megatron_rl.training.stage_resources import ResourceUse, StageKey, StageMeter, of_all_ranks, seconds_by_rank


@dataclass(frozen=True)
class Command:
    """What all ranks do with one engine. It is pickled: ``action`` is a module's function, or a partial of one."""

    name: str
    """As messages call it."""
    engine: str
    action: "Callable[[TrainerRank, Engine, RankBatch], Any]"
    """A rank's part; it gets the rank's own micro-batches."""
    fields: Mapping[str, int] | None = None
    """Of the batch that it is about, as columns; None: it is about none."""
    step: int | None = None
    """Whose sequences these are; None: nothing of the batch is kept."""
    gathers: bool = False
    """The action gives a 1-D tensor on ranks that report, None on the others; the driver gets them by replica."""
    stage: StageKey | None = None
    """Whose work it is."""

    def __str__(self) -> str:
        return f"{self.name} of the engine {self.engine}"


@dataclass(frozen=True)
class Release:
    """What the ranks hold of a step's sequences may go."""

    step: int | None
    """None: of every step."""


class Notice(Enum):
    """What the driver says that concerns no engine."""

    heartbeat = "heartbeat"
    free_memory = "free_memory"
    """Leave the device to the servers on it: all models step aside, and what the allocators hold unused goes back."""
    report_use = "report_use"
    """Say what each stage used since the last report."""
    report_saves = "report_saves"
    """Say whether all that is saved in the background is written."""
    finish_saves = "finish_saves"
    """Make what was saved in the background appear."""
    stop = "stop"


class TrainerRank:
    """One rank: its engines by name and how it carries out a command."""

    def __init__(self, config: Config, topology: Topology, engines: Mapping[str, Engine]) -> None:
        self.config = config
        self.topology = topology
        self.engines = engines
        self.export = WeightExport(config)
        self.held = CachesByStep(ImagePatcher(config.policy.path, [engine.hf_config for engine in engines.values()]))
        self.use = StageMeter()
        self._profiler = stage_profiler(config, topology.rank)
        self.replicas = {name: ReplicaRanks.of(e.parallel, topology.world_size) for name, e in engines.items()}
        self.note: Callable[[str], None] = lambda text: None
        """Told how far long work is."""

    def serve(self) -> None:
        """Carry out the driver's commands until it says stop (every rank but 0)."""
        try:
            while self._serve_one():
                pass
        except RuntimeError as error:
            if not collectives.is_lost_connection(error):
                raise
            # The rank that went away has said why, or was told to stop: a second account would only hide the first, and
            # a failure of this rank's own could be taken for it.
            sys.exit(0)
        finally:
            self.export.close()

    def _serve_one(self) -> bool:
        process_probe.set_status("waits", "the driver's next command")
        command = collectives.broadcast_object(None, what="its next command")
        process_probe.set_status("waits")
        if isinstance(command, Notice):
            self.heed(command)
            return command is not Notice.stop
        if isinstance(command, Release):
            self.held.release(command.step)
            return True
        if isinstance(command, Errand):
            command.report()
            return True
        self.start_stage(command.stage)
        self.execute(command)
        return True

    def start_stage(self, stage: StageKey | None) -> None:
        """What this rank does from now on counts as the stage's."""
        if self._profiler is not None:
            self._profiler.start_stage(stage)
        self.use.start_stage(stage)

    def heed(self, notice: Notice) -> list[Any]:
        """Do as told; the driver gets what the ranks report, by rank."""
        if notice is Notice.free_memory:
            self.offload_others("")
            free_cached_memory()
        elif notice is Notice.report_use:
            self.start_stage(None)
            return collectives.gather_objects(self.use.take(), what="what the ranks used")
        elif notice is Notice.report_saves:
            written = all(engine.save_is_complete for engine in self.engines.values())
            return collectives.gather_objects(written, what="whether its checkpoint is written")
        elif notice is Notice.finish_saves:
            self._finish_saves()
        return []

    def offload_others(self, name: str) -> None:
        """Every other engine leaves the device to this one; an empty name: all do."""
        for other, engine in self.engines.items():
            if other != name:
                engine.offload()

    def _finish_saves(self) -> None:
        problems = []
        for engine in self.engines.values():
            try:
                engine.finish_save()
            except CheckpointSaveError as error:
                problems.append(str(error))  # the next engine's save is on its way, too
        if problems and self.topology.rank == 0:
            raise CheckpointSaveError("; ".join(problems))

    def execute(
        self, command: Command, payloads: Sequence[Payload] | None = None, ways: Mapping[str, Any] | None = None
    ) -> Any:
        """This rank's part of ``command``; the driver has ``payloads`` and their ``ways``, and gets what the ranks report."""
        self.offload_others(command.engine)
        engine, replicas = self.engines[command.engine], self.replicas[command.engine]
        with hang_report.track_activity(str(command)):
            share = RankBatch()
            if command.fields is not None:
                what = f"the batches of the {command}"
                payload = collectives.scatter_payloads(payloads, replicas.replica_roots, engine.topology, **ways or {}, what=what)
                share = self.held.of(engine.topology, engine.parallel, command.step).take(payload, command.fields)
            with self.use.working():
                result = command.action(self, engine, share)
        if command.gathers:
            what = f"the results of the {command}"
            return collectives.gather_tensors(result, senders=replicas.reporters, what=what)
        return result


class TrainerGroup:
    """The driver's side; engines may have different layouts. Batches go in whole and come back in their own order."""

    def __init__(self, worker: TrainerRank) -> None:
        self._worker = worker
        self._stage: StageKey | None = None
        self._sharing = {
            name: ReplicaPlanner(
                engine.parallel,
                len(worker.replicas[name].replica_roots),
                worker.config.batch.max_tokens_per_microbatch,
                flops_cost(engine.hf_config, role=engine.role),
            )
            for name, engine in worker.engines.items()
        }
        self._ledgers: dict[tuple[int, int] | None, CacheDirectory] = {}
        """By layout and step: what the ranks hold."""
        self.ways = ArrayTransport(worker.topology.world_size)

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(self._worker.engines)

    @property
    def notes(self) -> list[str]:
        """What is worth knowing about the models as they were loaded, for the display."""
        engines, batch = self._worker.engines, self._worker.config.batch
        longest = batch.max_prompt_tokens + batch.max_response_tokens
        notes = [engines["policy"].mtp_note] if "policy" in engines else []
        notes += [note for engine in engines.values() for note in (engine.unread_tensors_note, engine.layers_note(longest))]
        return list(dict.fromkeys(filter(None, [*notes, memory_note(self._worker.config)])))

    def share_out(self, batch: PackedBatch, updates: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Settle which replica works on which sequence of this step, in every layout. Inside ``stage``; not collective.

        ``updates``: by engine, the ids of the sequences of each optimizer step to come; each is to be even. Without it a
        step's sequences are shared out by the first call that is about them.
        """
        if not batch.ids:
            return
        for layout in {engine.topology.layout for engine in self._worker.engines.values()}:
            names = [name for name, engine in self._worker.engines.items() if engine.topology.layout == layout]
            groups = [group for name in names for group in updates.get(name, ())]
            self._settle_homes(self._about(names[0], batch), groups)

    def logprobs(
        self,
        batch: PackedBatch,
        rows: Sequence[int] | None = None,
        *,
        temperature: float,
        engine: str = "policy",
        keeps_routes: bool = False,
    ) -> Tensor:
        """[T] float32 log-probs of the policy (or the reference) where fields["mask"], else 0; of the sequences ``rows`` alone.

        ``keeps_routes``: the step's updates of the engine follow the experts that this pass chose. They stay on the ranks.
        """
        if not batch.num_sequences or (rows is not None and not len(rows)):
            return torch.zeros(len(batch.tokens))
        about = self._about(engine, batch.only("mask", "lm_mask", ROUTES))
        answer, routes = about.ledger.column(), about.ledger.column() if keeps_routes else None
        action = partial(rank_methods.logprobs, temperature=temperature, answer=answer, routes=routes)
        plan = self._plan(about, rows)
        results = self._call(Command("logprobs", engine, action, gathers=True), about, plan)
        (logprobs,) = restore(batch, plan, results, per_sequence=False)
        about.ledger.answered(answer, about.keys, plan, logprobs)
        if routes is not None:
            about.ledger.answered(routes, about.keys, plan)
            about.ledger.routes[engine] = routes
        return logprobs

    def values(self, batch: PackedBatch, *, engine: str = "critic") -> tuple[Tensor, Tensor]:
        """(values [T], final_values [N]) of the critic (or a reward model), float32."""
        if not batch.num_sequences:
            return torch.zeros(0), torch.zeros(0)
        about = self._about(engine, batch.only())  # values are of tokens alone
        plan = self._plan(about)
        results = self._call(Command("values", engine, rank_methods.values, gathers=True), about, plan)
        values, final_values = restore(batch, plan, results, per_sequence=True)
        return values, final_values

    def update(
        self,
        engine: str,
        batch: PackedBatch,
        rows: Sequence[int] | None = None,
        *,
        objective: str,
        denominators: dict[str, float],
        temperature: float = 1.0,
        keeps_logprobs: bool = False,
    ) -> UpdateResult:
        """One optimizer step of ``engine`` on the sequences ``rows`` of ``batch`` (None: on all).

        Denominators are those of losses.build, over all of these. ``keeps_logprobs``: a policy's update takes the log-probs of
        its forward pass for the old ones, and they come with the result.
        """
        action = partial(
            rank_methods.update,
            objective=objective,
            denominators=denominators,
            temperature=temperature,
            keeps_logprobs=keeps_logprobs,
        )
        logprobs: Tensor | None = None
        about = self._about(engine, batch)
        routes = about.ledger.routes.get(engine)
        plan = self._plan(about, rows, may_move=routes is None)
        command = Command("update", engine, action, fields={} if routes is None else {ROUTES: routes})
        result = self._call(command, about, plan)
        if keeps_logprobs:
            found = self._call(Command("take_logprobs", engine, rank_methods.pop_logprobs, gathers=True))
            (logprobs,) = restore(replace(batch, spans=None), plan, found, per_sequence=False)
        return replace(result, plan=self._sharing[engine].metrics(plan, about.lengths), logprobs=logprobs)

    def export_weights(self, engine: str, to: GatherTarget = GatherTarget.driver) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors for this rank, streamed; must be walked to its end.

        The other ranks begin at once and do what ``to`` asks of them (``WeightExport``). An iterator that was begun
        runs its gathers to their end, however it is left.
        """
        command = Command("export", engine, partial(rank_methods.export, to=to))
        self._announce(command)
        self._worker.offload_others(engine)
        return exhausting(self._worker.engines[engine].export_weights(to), hang_report.track_activity(str(command)))

    def expected_weights(self, engine: str) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor that export_weights gives."""
        return self._worker.engines[engine].expected_weights()

    def set_progress_callback(self, note: Callable[[str], None]) -> None:
        """``note`` is told how far a long save is."""
        self._worker.note = note

    def save_hf(self, engine: str, folder: str) -> None:
        """Write the model as a Hugging Face folder, which all ranks must see."""
        self._call(Command("save_hf", engine, partial(rank_methods.save_hf, folder=folder)))

    def save_state(self, engine: str, folder: str) -> None:
        """Write weights, optimizer state and schedule. Raises CheckpointNotSaved; the group goes on."""
        self._call(Command("save_state", engine, partial(rank_methods.save_state, folder=folder)))

    def start_save(self, engine: str, folder: str) -> None:
        """``save_state`` that goes on in the background: the engine may train on, and the folder appears with ``finish_saves``.

        Raises CheckpointNotSaved.
        """
        self._call(Command("begin_save", engine, partial(rank_methods.start_save, folder=folder)))

    def saves_are_written(self) -> bool:
        """Whether ``finish_saves`` would not wait."""
        return all(self._tell(Notice.report_saves))

    def finish_saves(self) -> None:
        """Wait for what ``start_save`` began and make it appear. Raises CheckpointNotSaved; the group goes on."""
        self._tell(Notice.finish_saves)

    def load_state(self, engine: str, folder: str) -> None:
        """Continue from what ``save_state`` wrote, in this or another layout. Raises CheckpointError; the group goes on."""
        self._call(Command("load_state", engine, partial(rank_methods.load_state, folder=folder)))

    def heartbeat(self) -> None:
        """Tell the other ranks that the driver lives: their wait for a command begins anew."""
        self._tell(Notice.heartbeat)

    def topology_of(self, engine: str) -> Topology:
        """This rank's place in the engine's layout."""
        return self._worker.engines[engine].topology

    def free_memory(self) -> None:
        """Every rank leaves its device to the server on it, as far as the models' offload goes."""
        self._tell(Notice.free_memory)

    @contextmanager
    def stage(self, step: int, name: str) -> Iterator[None]:
        """What the ranks use inside counts as this stage's."""
        self._stage = StageKey(step, name)
        self._worker.start_stage(self._stage)
        try:
            yield
        finally:
            self._stage = None
            self._worker.start_stage(None)

    def release(self, step: int | None = None) -> None:
        """The ranks may forget the sequences of ``step``; None: of every step."""
        ended = [key for key in self._ledgers if key is not None and step in (None, key[1])]
        if ended:
            collectives.broadcast_object(Release(step), what="the end of a step")
            self._worker.held.release(step)
        for key in ended:
            del self._ledgers[key]

    def use_by_stage(self) -> dict[StageKey, tuple[ResourceUse, str]]:
        """Since the last call: memory and time of all ranks together, and ``rank:seconds`` of each one's work."""
        accounts = self._tell(Notice.report_use)
        by_rank = seconds_by_rank(accounts)
        return {stage: (use, by_rank[stage]) for stage, use in of_all_ranks(accounts).items()}

    def stop(self) -> None:
        """Let the other ranks leave ``TrainerRank.serve``."""
        self._tell(Notice.stop)

    def _about(self, engine: str, batch: PackedBatch) -> "About":
        key = None if self._stage is None or not batch.ids else (self._worker.engines[engine].topology.layout, self._stage.step)
        ledger = self._ledgers.get(key) or self._ledger(len(self._worker.replicas[engine].replica_roots))
        if key is not None:
            self._ledgers[key] = ledger
        keys, lengths = ledger.keys(batch)
        return About(engine, batch, lengths, None if key is None else key[1], ledger, keys)

    def _ledger(self, num_replicas: int) -> CacheDirectory:
        return CacheDirectory(num_replicas, self.ways.shared if self._worker.topology.world_size > 1 else None)

    def _settle_homes(self, about: "About", groups: Sequence[Sequence[int]]) -> None:
        """Of those of its sequences that have none; ``groups``: ids of what is to be even."""
        homes = about.ledger.homes
        new = {key: length for key, length in zip(about.keys, about.lengths, strict=True) if key not in homes}
        if not new:
            return
        key_of = {key[0]: key for key in new}
        parts = [[key_of[id] for id in group if id in key_of] for group in groups]
        pulls = PlacementPreferences.of(about.batch, about.keys, partial(self.ways.nodes, self._worker.replicas[about.engine]))
        homes |= self._sharing[about.engine].homes(new, parts, pulls)

    def _plan(self, about: "About", rows: Sequence[int] | None = None, *, may_move: bool = False) -> Plan:
        """Micro-batches of the batch's sequences ``rows``; None: of all."""
        rows = range(len(about.lengths)) if rows is None else rows
        homes = None
        if about.step is not None:
            self._settle_homes(about, ())
            homes = [about.ledger.homes[about.keys[row]] for row in rows]
        plan = self._sharing[about.engine].plan([about.lengths[row] for row in rows], homes, may_move=may_move)
        return [[[rows[index] for index in indices] for indices in of] for of in plan]

    def _call(self, command: Command, about: "About | None" = None, plan: Plan = ()) -> Any:  # type: ignore[assignment]
        """This rank's result, or the output ranks' where the command gathers."""
        payloads = None
        if about is not None:
            ledger = about.ledger
            fields = {name: ledger.column(values) for name, values in about.batch.columns().items()}
            command = replace(command, fields=fields | dict(command.fields or {}), step=about.step)
            payloads = ledger.payloads(about.batch, about.keys, plan, list(fields.values()))
        ways = self.ways.to(self._worker.replicas[command.engine])
        self._announce(command)
        return self._worker.execute(command, payloads, ways)

    def _announce(self, command: Command) -> None:
        collectives.broadcast_object(replace(command, stage=self._stage), what=str(command))

    def _tell(self, notice: Notice) -> list[Any]:
        collectives.broadcast_object(notice, what=notice.value)
        return self._worker.heed(notice)
