"""All trainer ranks as seen from the driver (rank 0): one call here, one collective action everywhere.

The other ranks sit in ``Worker.serve`` and wait for the driver's next command; the driver sends it, sends each rank
its own packed micro-batches as raw tensors, takes part itself, and gathers what the output ranks report. An idle
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
from megatron_rl.models.hf.gathering import Destination
from megatron_rl.parallel import collectives, stragglers
from megatron_rl.parallel.topology import Topology, coordinates
from megatron_rl.planning.flops import flops_cost
from megatron_rl.training import losses
from megatron_rl.training.batching import Plan, padded_share, plan_microbatches, plan_statistics
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.export import WeightExport, free_cached_memory, to_its_end
from megatron_rl.training.model_checkpoint import CheckpointError, CheckpointNotSaved
from megatron_rl.training.payloads import payloads_of, restore, unpack
from megatron_rl.training.stage_use import StageAccount, StageOfStep, Use, of_all_ranks


@dataclass(frozen=True)
class Command:
    """What all ranks do with one engine. It is pickled: ``action`` is a module's function, or a partial of one."""

    name: str
    """As messages call it."""
    engine: str
    action: "Callable[[Worker, Engine, list[PackedBatch]], Any]"
    """A rank's part; it gets the rank's own micro-batches."""
    sends_batches: bool = False
    gathers: bool = False
    """The action gives a 1-D tensor on ranks that report, None on the others; the driver gets them all."""
    stage: StageOfStep | None = None
    """Whose work it is."""

    def __str__(self) -> str:
        return f"{self.name} of the engine {self.engine}"


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


class Worker:
    """One rank: its engines by name and how it carries out a command."""

    def __init__(self, config: Config, topology: Topology, engines: Mapping[str, Engine]) -> None:
        self.config = config
        self.topology = topology
        self.engines = engines
        self.export = WeightExport(config)
        self.use = StageAccount()
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
        command = collectives.broadcast_object(None, what="its next command")
        if isinstance(command, Notice):
            self.heed(command)
            return command is not Notice.stop
        self.use.enter(command.stage)
        payload = collectives.receive(what=f"the batches of the {command}") if command.sends_batches else {}
        result = self.execute(command, unpack(payload))
        if command.gathers:
            collectives.gather_tensors(result, what=f"the results of the {command}")
        return True

    def heed(self, notice: Notice) -> list[Any]:
        """Do as told; the driver gets what the ranks report, by rank."""
        if notice is Notice.free_memory:
            self.give_turn_to("")
            free_cached_memory()
        elif notice is Notice.report_use:
            return collectives.gather_objects(self.use.take(), what="what the ranks used")
        elif notice is Notice.report_saves:
            written = all(engine.save_is_written for engine in self.engines.values())
            return collectives.gather_objects(written, what="whether its checkpoint is written")
        elif notice is Notice.finish_saves:
            self._finish_saves()
        return []

    def give_turn_to(self, name: str) -> None:
        """Every other engine leaves the device to this one; an empty name: all do."""
        for other, engine in self.engines.items():
            if other != name:
                engine.step_aside()

    def _finish_saves(self) -> None:
        problems = []
        for engine in self.engines.values():
            try:
                engine.finish_save()
            except CheckpointNotSaved as error:
                problems.append(str(error))  # the next engine's save is on its way, too
        if problems and self.topology.rank == 0:
            raise CheckpointNotSaved("; ".join(problems))

    def execute(self, command: Command, microbatches: list[PackedBatch]) -> Any:
        """This rank's part of ``command``."""
        self.give_turn_to(command.engine)
        with stragglers.working(str(command)):
            return command.action(self, self.engines[command.engine], microbatches)


@dataclass(frozen=True)
class _Places:
    """The ranks in the layout of one engine."""

    dp_ranks: tuple[int, ...]
    """By rank: whose micro-batches it takes."""
    reporters: tuple[int, ...]
    """By data-parallel rank: the rank that reports for it."""

    @classmethod
    def of(cls, engine: Engine) -> "_Places":
        num_ranks, last_stage = engine.topology.world_size, engine.topology.pp_size - 1
        places = [coordinates(rank, num_ranks, engine.parallel) for rank in range(num_ranks)]
        # One rank per data-parallel rank has the outputs: its tensor- and context-parallel peers have the same ones.
        reporters = {
            place.dp_rank: rank
            for rank, place in enumerate(places)
            if place.tp_rank == 0 and place.cp_rank == 0 and place.pp_rank == last_stage
        }
        return cls(tuple(place.dp_rank for place in places), tuple(reporters[dp_rank] for dp_rank in sorted(reporters)))


class TrainerGroup:
    """The driver's side; engines may have different layouts. Batches go in whole and come back in their own order."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stage: StageOfStep | None = None
        self._costs = {name: flops_cost(engine.hf_config, role=engine.role) for name, engine in worker.engines.items()}
        self._places = {name: _Places.of(engine) for name, engine in worker.engines.items()}

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(self._worker.engines)

    @property
    def notes(self) -> list[str]:
        """What is worth knowing about the models as they were loaded, for the display."""
        engines, batch = self._worker.engines, self._worker.config.batch
        longest = batch.max_prompt_tokens + batch.max_response_tokens
        notes = [engines["policy"].mtp_note] if "policy" in engines else []
        notes += [note for engine in engines.values() for note in (engine.unread_note, engine.layers_note(longest))]
        return list(dict.fromkeys(filter(None, notes)))

    def logprobs(self, batch: PackedBatch, *, temperature: float, engine: str = "policy") -> Tensor:
        """[T] float32 log-probs of the policy (or the reference) where fields["mask"], else 0."""
        if not batch.num_sequences:
            return torch.zeros(0)
        _, logprobs = self._logprobs(batch, engine, temperature=temperature, record_routes=False)
        return logprobs

    def logprobs_and_routes(
        self, batch: PackedBatch, *, temperature: float, engine: str = "policy"
    ) -> tuple[Tensor, Tensor]:
        """``logprobs``, and the experts that this pass chose: [T, layers, k] int16 (``data.batch.ROUTES``)."""
        if not batch.num_sequences:
            return torch.zeros(0), torch.zeros((0, *self._worker.engines[engine].routes_shape), dtype=torch.int16)
        plan, logprobs = self._logprobs(batch, engine, temperature=temperature, record_routes=True)
        gathered = self._call(Command("take_routes", engine, _take_routes, gathers=True))
        shape = self._worker.engines[engine].routes_shape
        routes = torch.zeros((len(batch.tokens), *shape), dtype=torch.int16)
        starts, lengths = batch.cu_seqlens[:-1], batch.lengths
        reporters = self._places[engine].reporters
        for dp_rank, microbatches in enumerate(plan):
            found = gathered[reporters[dp_rank]].view(torch.int16).view(-1, *shape)
            order = [index for indices in microbatches for index in indices]
            rows = [torch.arange(int(lengths[index])) + starts[index] for index in order]
            if rows:
                routes[torch.cat(rows)] = found
        return logprobs, routes

    def values(self, batch: PackedBatch, *, engine: str = "critic") -> tuple[Tensor, Tensor]:
        """(values [T], final_values [N]) of the critic (or a reward model), float32."""
        if not batch.num_sequences:
            return torch.zeros(0), torch.zeros(0)
        command = Command("values", engine, _values, sends_batches=True, gathers=True)
        plan, results = self._answers(command, batch.only())  # values are of tokens alone
        values, final_values = restore(batch, plan, results, per_sequence=True)
        return values, final_values

    def update(
        self,
        engine: str,
        batch: PackedBatch,
        *,
        objective: str,
        denominators: dict[str, float],
        temperature: float = 1.0,
    ) -> UpdateResult:
        """One optimizer step of ``engine`` on ``batch``; denominators are those of losses.build, over the whole batch."""
        action = partial(_update, objective=objective, denominators=denominators, temperature=temperature)
        plan = self._plan(engine, batch)
        result = self._call(Command("update", engine, action, sends_batches=True), payloads_of(batch, plan))
        return replace(result, plan=self._plan_metrics(engine, batch, plan))

    def export_weights(self, engine: str, to: Destination = Destination.driver) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors for this rank, streamed; must be walked to its end.

        The other ranks begin at once and do what ``to`` asks of them (``WeightExport``). An iterator that was begun
        runs its gathers to their end, however it is left.
        """
        command = Command("export", engine, partial(_export, to=to))
        self._announce(command)
        self._worker.give_turn_to(engine)
        return to_its_end(self._worker.engines[engine].export_weights(to), stragglers.working(str(command)))

    def expected_weights(self, engine: str) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor that export_weights gives."""
        return self._worker.engines[engine].expected_weights()

    def report_to(self, note: Callable[[str], None]) -> None:
        """``note`` is told how far a long save is."""
        self._worker.note = note

    def save_hf(self, engine: str, folder: str) -> None:
        """Write the model as a Hugging Face folder, which all ranks must see."""
        self._call(Command("save_hf", engine, partial(_save_hf, folder=folder)))

    def save_state(self, engine: str, folder: str) -> None:
        """Write weights, optimizer state and schedule. Raises CheckpointNotSaved; the group goes on."""
        self._call(Command("save_state", engine, partial(_save_state, folder=folder)))

    def begin_save(self, engine: str, folder: str) -> None:
        """``save_state`` that goes on in the background: the engine may train on, and the folder appears with ``finish_saves``.

        Raises CheckpointNotSaved.
        """
        self._call(Command("begin_save", engine, partial(_begin_save, folder=folder)))

    def saves_are_written(self) -> bool:
        """Whether ``finish_saves`` would not wait."""
        return all(self._tell(Notice.report_saves))

    def finish_saves(self) -> None:
        """Wait for what ``begin_save`` began and make it appear. Raises CheckpointNotSaved; the group goes on."""
        self._tell(Notice.finish_saves)

    def load_state(self, engine: str, folder: str) -> None:
        """Continue from what ``save_state`` wrote, in this or another layout. Raises CheckpointError; the group goes on."""
        self._call(Command("load_state", engine, partial(_load_state, folder=folder)))

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
        self._stage = StageOfStep(step, name)
        self._worker.use.enter(self._stage)
        try:
            yield
        finally:
            self._stage = None
            self._worker.use.enter(None)

    def use_by_stage(self) -> dict[StageOfStep, Use]:
        """Memory and CPU time of all ranks since the last call."""
        return of_all_ranks(self._tell(Notice.report_use))

    def stop(self) -> None:
        """Let the other ranks leave ``Worker.serve``."""
        self._tell(Notice.stop)

    def _logprobs(
        self, batch: PackedBatch, engine: str, *, temperature: float, record_routes: bool
    ) -> tuple[Plan, Tensor]:
        action = partial(_logprobs, temperature=temperature, record_routes=record_routes)
        command = Command("logprobs", engine, action, sends_batches=True, gathers=True)
        plan, results = self._answers(command, batch.only("mask", "lm_mask", ROUTES))
        (logprobs,) = restore(batch, plan, results, per_sequence=False)
        return plan, logprobs

    def _plan(self, engine: str, batch: PackedBatch) -> Plan:
        parallel = self._worker.engines[engine].parallel
        return plan_microbatches(
            batch.lengths.tolist(),
            len(self._places[engine].reporters),
            self._worker.config.batch.max_tokens_per_microbatch,
            cost=self._costs[engine],
            # An interleaved schedule takes micro-batches in groups of as many as there are stages.
            multiple_of=parallel.pipeline_parallel_size if parallel.virtual_pipeline_size > 1 else 1,
        )

    def _plan_metrics(self, engine: str, batch: PackedBatch, plan: Plan) -> dict[str, float]:
        parallel, lengths = self._worker.engines[engine].parallel, batch.lengths.tolist()
        even = plan_statistics(plan, lengths, self._costs[engine])
        num_context_ranks = parallel.context_parallel_size
        sequence_multiple = 2 * num_context_ranks if num_context_ranks > 1 else 1
        split_ranks = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
        padded = padded_share(
            plan, lengths, sequence_multiple=sequence_multiple, pack_multiple=sequence_multiple * split_ranks
        )
        return {
            "num_microbatches": float(even.num_microbatches),
            "num_stand_ins": float(even.num_stand_ins),
            "rank_imbalance": even.rank_imbalance,
            "microbatch_imbalance": even.microbatch_imbalance,
            "padding_share": padded,
        }

    def _answers(self, command: Command, batch: PackedBatch) -> tuple[Plan, list[Tensor]]:
        """The plan and, by data-parallel rank, what was reported for it."""
        plan = self._plan(command.engine, batch)
        gathered = self._call(command, payloads_of(batch, plan))
        return plan, [gathered[rank] for rank in self._places[command.engine].reporters]

    def _call(self, command: Command, payloads: Sequence[dict[str, Tensor]] = ()) -> Any:
        """This rank's result, or all ranks' where the command gathers; ``payloads``: one per data-parallel rank."""
        self._announce(command)
        microbatches: list[PackedBatch] = []
        if command.sends_batches:
            dp_ranks = self._places[command.engine].dp_ranks
            own = collectives.send_batches(
                [payloads[dp_rank] for dp_rank in dp_ranks], what=f"the batches of the {command}"
            )
            microbatches = unpack(own)
        result = self._worker.execute(command, microbatches)
        if command.gathers:
            return collectives.gather_tensors(result, what=f"the results of the {command}")
        return result

    def _announce(self, command: Command) -> None:
        collectives.broadcast_object(replace(command, stage=self._stage), what=str(command))

    def _tell(self, notice: Notice) -> list[Any]:
        collectives.broadcast_object(notice, what=notice.value)
        return self._worker.heed(notice)


def _logprobs(
    worker: Worker, engine: Engine, microbatches: list[PackedBatch], *, temperature: float, record_routes: bool
) -> Tensor | None:
    return _joined(engine, engine.logprobs(microbatches, temperature=temperature, record_routes=record_routes))


def _take_routes(worker: Worker, engine: Engine, microbatches: list[PackedBatch]) -> Tensor | None:
    routes = _joined(engine, [part.flatten() for part in engine.take_routes()])
    # As bytes: gloo has no 16-bit integers.
    return routes if routes is None else routes.to(torch.int16).view(torch.uint8)


def _values(worker: Worker, engine: Engine, microbatches: list[PackedBatch]) -> Tensor | None:
    return _joined(engine, [part for values, final in engine.values(microbatches) for part in (values, final)])


def _update(
    worker: Worker,
    engine: Engine,
    microbatches: list[PackedBatch],
    *,
    objective: str,
    denominators: dict[str, float],
    temperature: float,
) -> UpdateResult:
    loss = losses.build(objective, worker.config.algorithm, denominators)
    return engine.update(microbatches, loss, temperature=temperature)


def _export(worker: Worker, engine: Engine, microbatches: list[PackedBatch], *, to: Destination) -> None:
    worker.export.take_part(engine, to)


def _save_hf(worker: Worker, engine: Engine, microbatches: list[PackedBatch], *, folder: str) -> None:
    engine.save_hf(folder, worker.note)


def _save_state(worker: Worker, engine: Engine, microbatches: list[PackedBatch], *, folder: str) -> None:
    with _said_by_the_driver(worker):
        engine.save_state(folder)


def _begin_save(worker: Worker, engine: Engine, microbatches: list[PackedBatch], *, folder: str) -> None:
    with _said_by_the_driver(worker):
        engine.begin_save(folder, in_background=True)


def _load_state(worker: Worker, engine: Engine, microbatches: list[PackedBatch], *, folder: str) -> None:
    with _said_by_the_driver(worker):
        engine.load_state(folder)


@contextmanager
def _said_by_the_driver(worker: Worker) -> Iterator[None]:
    """Of what all ranks raise about a checkpoint, the driver's is enough: it decides how to go on."""
    try:
        yield
    except (CheckpointError, CheckpointNotSaved):
        if worker.topology.rank == 0:
            raise


def _joined(engine: Engine, parts: Sequence[Tensor]) -> Tensor | None:
    """What an output rank reports: its parts end to end."""
    if not engine.is_output_rank:
        return None
    return torch.cat([part.cpu() for part in parts]) if parts else torch.zeros(0)
