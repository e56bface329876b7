"""All trainer ranks as seen from the driver (rank 0): one call here, one collective action everywhere.

The other ranks wait in ``TrainerRank.serve`` for the driver's next call; the driver sends it, sends each replica the rows that
its caches lack for its micro-batches (``cache_directory.py``), runs its own part, and gathers the results of the output
ranks. An idle driver sends heartbeats, so that a rank's deadline (parallel.collective_timeout_s) means a driver in trouble
and not a long generation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.data.batch import ROUTES, PackedBatch
from megatron_rl.families.flops import flops_cost
from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.parallel import collectives, hang_report
from megatron_rl.parallel.topology import Topology
from megatron_rl.training import rank_methods
from megatron_rl.training.array_transport import ArrayTransport
from megatron_rl.training.batching import Plan
from megatron_rl.training.cache_directory import BatchOnReplicas, CacheDirectory
from megatron_rl.training.engine import UpdateResult
from megatron_rl.training.export import exhausting
from megatron_rl.training.microbatch_io import restore
from megatron_rl.training.profiling import memory_note
from megatron_rl.training.replica_assignment import PlacementPreferences, ReplicaPlanner
from megatron_rl.training.stage_resources import ResourceUse, StageKey, of_all_ranks, seconds_by_rank
from megatron_rl.training.trainer_rank import Call, TrainerRank


class TrainerGroup:
    """The driver's side; engines may have different layouts. Batches go in whole and come back in their own order."""

    def __init__(self, rank: TrainerRank) -> None:
        self.driver = rank
        """This process's own rank."""
        self._stage: StageKey | None = None
        self._sharing = {
            name: ReplicaPlanner(
                engine.parallel,
                len(rank.replicas[name].replica_roots),
                rank.config.batch.max_tokens_per_microbatch,
                flops_cost(engine.hf_config, role=engine.role),
            )
            for name, engine in rank.engines.items()
        }
        self._directories: dict[tuple[int, int] | None, CacheDirectory] = {}
        """The directory of each layout and step."""
        self.transport = ArrayTransport(rank.topology.world_size, self._call)

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(self.driver.engines)

    @property
    def notes(self) -> list[str]:
        """Messages about the models as they were loaded, for the display."""
        engines, batch = self.driver.engines, self.driver.config.batch
        longest = batch.max_prompt_tokens + batch.max_response_tokens
        notes = [engines["policy"].mtp_note] if "policy" in engines else []
        notes += [note for engine in engines.values() for note in (engine.unread_tensors_note, engine.layers_note(longest))]
        return list(dict.fromkeys(filter(None, [*notes, memory_note(self.driver.config)])))

    def share_out(self, batch: PackedBatch, updates: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Settle which replica works on which sequence of this step, in every layout. Inside ``stage``; not collective.

        ``updates``: by engine, the ids of the sequences of each optimizer step to come; each is to be even. Without it a
        step's sequences are shared out by the first call that is about them.
        """
        if not batch.ids:
            return
        for layout in {engine.topology.layout for engine in self.driver.engines.values()}:
            names = [name for name, engine in self.driver.engines.items() if engine.topology.layout == layout]
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
        answer, routes = about.directory.column(), about.directory.column() if keeps_routes else None
        function = partial(rank_methods.logprobs, temperature=temperature, answer=answer, routes=routes)
        plan = self._plan(about, rows)
        results = self._call(Call("logprobs", function, engine, gathers=True), about, plan)
        (logprobs,) = restore(batch, plan, results, per_sequence=False)
        about.directory.answered(answer, about.keys, plan, logprobs)
        if routes is not None:
            about.directory.answered(routes, about.keys, plan)
            about.directory.routes[engine] = routes
        return logprobs

    def values(self, batch: PackedBatch, *, engine: str = "critic") -> tuple[Tensor, Tensor]:
        """(values [T], final_values [N]) of the critic (or a reward model), float32."""
        if not batch.num_sequences:
            return torch.zeros(0), torch.zeros(0)
        about = self._about(engine, batch.only())  # values are of tokens alone
        plan = self._plan(about)
        results = self._call(Call("values", rank_methods.values, engine, gathers=True), about, plan)
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
        function = partial(
            rank_methods.update,
            objective=objective,
            denominators=denominators,
            temperature=temperature,
            keeps_logprobs=keeps_logprobs,
        )
        logprobs: Tensor | None = None
        about = self._about(engine, batch)
        routes = about.directory.routes.get(engine)
        plan = self._plan(about, rows, may_move=routes is None)
        call = Call("update", function, engine, columns={} if routes is None else {ROUTES: routes})
        result = self._call(call, about, plan)
        if keeps_logprobs:
            found = self._call(Call("take_logprobs", rank_methods.pop_logprobs, engine, gathers=True))
            (logprobs,) = restore(replace(batch, spans=None), plan, found, per_sequence=False)
        return replace(result, plan=self._sharing[engine].metrics(plan, about.lengths), logprobs=logprobs)

    def export_weights(self, engine: str, to: GatherTarget = GatherTarget.driver) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors for this rank, streamed; must be walked to its end.

        The other ranks begin at once and do what ``to`` asks of them (``WeightExport``). An iterator that was begun
        runs its gathers to their end, however it is left.
        """
        call = Call("export", partial(rank_methods.export, to=to), engine)
        self._announce(call)
        self.driver.offload_others(engine)
        return exhausting(self.driver.engines[engine].export_weights(to), hang_report.track_activity(str(call)))

    def expected_weights(self, engine: str) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor that export_weights gives."""
        return self.driver.engines[engine].expected_weights()

    def set_progress_callback(self, note: Callable[[str], None]) -> None:
        """``note`` is told how far a long save is."""
        self.driver.note = note

    def save_hf(self, engine: str, folder: str) -> None:
        """Write the model as a Hugging Face folder, which all ranks must see."""
        self._call(Call("save_hf", partial(rank_methods.save_hf, folder=folder), engine))

    def save_state(self, engine: str, folder: str) -> None:
        """Write weights, optimizer state and schedule. Raises CheckpointSaveError; the group goes on."""
        self._call(Call("save_state", partial(rank_methods.save_state, folder=folder), engine))

    def start_save(self, engine: str, folder: str) -> None:
        """``save_state`` that goes on in the background: the engine may train on, and the folder appears with ``finish_saves``.

        Raises CheckpointSaveError.
        """
        self._call(Call("begin_save", partial(rank_methods.start_save, folder=folder), engine))

    def saves_are_written(self) -> bool:
        """True if ``finish_saves`` would not wait."""
        return all(self._call(Call("report_saves", rank_methods.report_saves)))

    def finish_saves(self) -> None:
        """Wait for what ``start_save`` began and make it appear. Raises CheckpointSaveError; the group goes on."""
        self._call(Call("finish_saves", rank_methods.finish_saves))

    def load_state(self, engine: str, folder: str) -> None:
        """Continue from what ``save_state`` wrote, in this or another layout. Raises CheckpointError; the group goes on."""
        self._call(Call("load_state", partial(rank_methods.load_state, folder=folder), engine))

    def heartbeat(self) -> None:
        """Tell the other ranks that the driver lives: their wait for a call starts again."""
        self._call(Call("heartbeat", rank_methods.heartbeat))

    def topology_of(self, engine: str) -> Topology:
        """This rank's place in the engine's layout."""
        return self.driver.engines[engine].topology

    def free_memory(self) -> None:
        """Every rank leaves its device to the server on it, as far as the models' offload goes."""
        self._call(Call("free_memory", rank_methods.free_memory))

    @contextmanager
    def stage(self, step: int, name: str) -> Iterator[None]:
        """Count what the ranks use inside as this stage's."""
        self._stage = StageKey(step, name)
        self.driver.start_stage(self._stage)
        try:
            yield
        finally:
            self._stage = None
            self.driver.start_stage(None)

    def release(self, step: int | None = None) -> None:
        """The ranks may forget the sequences of ``step``; None: of every step."""
        ended = [key for key in self._directories if key is not None and step in (None, key[1])]
        if ended:
            self._call(Call("the end of a step", partial(rank_methods.release, step=step)))
        for key in ended:
            del self._directories[key]

    def use_by_stage(self) -> dict[StageKey, tuple[ResourceUse, str]]:
        """Since the last call: memory and time of all ranks together, and ``rank:seconds`` of each one's work."""
        accounts = self._call(Call("report_use", rank_methods.report_use))
        by_rank = seconds_by_rank(accounts)
        return {stage: (use, by_rank[stage]) for stage, use in of_all_ranks(accounts).items()}

    def stop(self) -> None:
        """Let the other ranks leave ``TrainerRank.serve``."""
        self._call(Call("stop", rank_methods.stop))

    def _about(self, engine: str, batch: PackedBatch) -> BatchOnReplicas:
        key = None if self._stage is None or not batch.ids else (self.driver.engines[engine].topology.layout, self._stage.step)
        directory = self._directories.get(key) or self._directory(len(self.driver.replicas[engine].replica_roots))
        if key is not None:
            self._directories[key] = directory
        keys, lengths = directory.keys(batch)
        return BatchOnReplicas(engine, batch, lengths, None if key is None else key[1], directory, keys)

    def _directory(self, num_replicas: int) -> CacheDirectory:
        return CacheDirectory(num_replicas, self.transport.shared if self.driver.topology.world_size > 1 else None)

    def _settle_homes(self, about: BatchOnReplicas, groups: Sequence[Sequence[int]]) -> None:
        """Assign a replica to every sequence of the batch that has none yet, and balance each of ``groups`` (sequence ids of an update)."""
        homes = about.directory.assigned
        new = {key: length for key, length in zip(about.keys, about.lengths, strict=True) if key not in homes}
        if not new:
            return
        key_of = {key[0]: key for key in new}
        parts = [[key_of[id] for id in group if id in key_of] for group in groups]
        pulls = PlacementPreferences.of(about.batch, about.keys, partial(self.transport.nodes, self.driver.replicas[about.engine]))
        homes |= self._sharing[about.engine].homes(new, parts, pulls)

    def _plan(self, about: BatchOnReplicas, rows: Sequence[int] | None = None, *, may_move: bool = False) -> Plan:
        """Micro-batches of the batch's sequences ``rows``; None: of all."""
        rows = range(len(about.lengths)) if rows is None else rows
        homes = None
        if about.step is not None:
            self._settle_homes(about, ())
            homes = [about.directory.assigned[about.keys[row]] for row in rows]
        plan = self._sharing[about.engine].plan([about.lengths[row] for row in rows], homes, may_move=may_move)
        return [[[rows[index] for index in indices] for indices in of] for of in plan]

    def _call(self, call: Call, about: BatchOnReplicas | None = None, plan: Plan = ()) -> Any:  # type: ignore[assignment]
        """The driver's own result, or the results that the call gathers."""
        payloads = None
        if about is not None:
            directory = about.directory
            columns = {name: directory.column(values) for name, values in about.batch.columns().items()}
            call = replace(call, columns=columns | dict(call.columns or {}), step=about.step)
            payloads = directory.payloads(about.batch, about.keys, plan, list(columns.values()))
        reaches = self.transport.reaches(self.driver.replicas[call.engine]) if call.engine else ()
        self._announce(call)
        return self.driver.execute(call, payloads, reaches)

    def _announce(self, call: Call) -> None:
        collectives.broadcast_object(replace(call, stage=self._stage), what=str(call))
