"""All trainer ranks as seen from the driver (rank 0): one call here, one collective action everywhere.

The other ranks wait in ``TrainerRank.serve`` for the driver's next call. The driver sends the call, sends each
replica the rows that its caches lack for its micro-batches (``sequence_cache.py``), runs its own part, and gathers
the results of the output ranks. An idle driver sends heartbeats, so that a rank's deadline
(parallel.collective_timeout_s) indicates a driver that hangs, not a long generation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.data.batch import ROUTES, PackedBatch, restore
from megatron_rl.families.flops import flops_cost
from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.parallel import collectives, hang_report
from megatron_rl.parallel.collectives import Payload
from megatron_rl.parallel.topology import Topology
from megatron_rl.training import trainer_rank
from megatron_rl.training.array_transport import ArrayTransport
from megatron_rl.training.batching import Plan
from megatron_rl.training.engine import UpdateResult
from megatron_rl.training.export import exhausting
from megatron_rl.training.profiling import ResourceUse, StageKey, memory_note, of_all_ranks, seconds_by_rank
from megatron_rl.training.replica_assignment import PlacementPreferences, ReplicaPlanner
from megatron_rl.training.sequence_cache import CacheDirectory
from megatron_rl.training.trainer_rank import Call, TrainerRank


class TrainerGroup:
    """Calls on all ranks; engines may have different layouts. Arguments and results are whole batches, in the batch's order."""

    def __init__(self, rank: TrainerRank) -> None:
        self.driver = rank
        """This process's own rank."""
        self._stage: StageKey | None = None
        self._planners = {
            name: ReplicaPlanner(
                engine.parallel,
                len(rank.replicas[name].replica_roots),
                rank.config.batch.max_tokens_per_microbatch,
                flops_cost(engine.hf_config, role=engine.role),
            )
            for name, engine in rank.engines.items()
        }
        self._directories: dict[tuple[int, int | None], CacheDirectory] = {}
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
        """Assign the sequences of this step to replicas, in every layout. Inside ``stage``; not collective.

        ``updates``: by engine, the sequence ids of each planned update, which is balanced over the replicas.
        Without this call the first call on a sequence assigns it.
        """
        if not batch.ids:
            return
        for layout in {engine.topology.layout for engine in self.driver.engines.values()}:
            names = [name for name, engine in self.driver.engines.items() if engine.topology.layout == layout]
            groups = [group for name in names for group in updates.get(name, ())]
            self._assign(names[0], batch, self._directory_of(names[0], batch), groups)

    def logprobs(
        self,
        batch: PackedBatch,
        rows: Sequence[int] | None = None,
        *,
        temperature: float,
        engine: str = "policy",
        keeps_routes: bool = False,
    ) -> Tensor:
        """[T] float32 log-probs of the policy (or the reference) where fields["mask"], else 0; only of the sequences ``rows``.

        ``keeps_routes``: the step's updates of the engine replay the experts that this pass chooses. The routes stay on the ranks.
        """
        if not batch.num_sequences or (rows is not None and not len(rows)):
            return torch.zeros(len(batch.tokens))
        # Any other field would be sent to the ranks without being read there.
        batch = batch.only("mask", "lm_mask", ROUTES)
        directory = self._directory_of(engine, batch)
        answer, routes = directory.column(), directory.column() if keeps_routes else None
        step = directory.step
        function = partial(trainer_rank.logprobs, temperature=temperature, step=step, answer=answer, routes=routes)
        plan = self._plan(engine, batch, directory, rows)
        results = self._call_on_batch(Call("logprobs", function, engine, gathers=True), batch, directory, plan)
        (logprobs,) = restore(batch, plan, results, per_sequence=False)
        directory.answered(answer, batch, plan, logprobs)
        if routes is not None:
            directory.answered(routes, batch, plan)
            directory.routes[engine] = routes
        return logprobs

    def values(self, batch: PackedBatch, *, engine: str = "critic") -> tuple[Tensor, Tensor]:
        """(values [T], final_values [N]) of the critic (or a reward model), float32."""
        if not batch.num_sequences:
            return torch.zeros(0), torch.zeros(0)
        batch = batch.only()  # values are of tokens alone
        directory = self._directory_of(engine, batch)
        plan = self._plan(engine, batch, directory)
        results = self._call_on_batch(Call("values", trainer_rank.values, engine, gathers=True), batch, directory, plan)
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
        """One update of ``engine`` on the sequences ``rows`` of ``batch`` (None: on all).

        ``denominators``: as in ``losses.build``, over these sequences. ``keeps_logprobs``: a policy's update uses
        the log-probs of its own forward pass as the old log-probs, and returns them in the result.
        """
        function = partial(
            trainer_rank.update,
            objective=objective,
            denominators=denominators,
            temperature=temperature,
            keeps_logprobs=keeps_logprobs,
        )
        logprobs: Tensor | None = None
        directory = self._directory_of(engine, batch)
        routes = directory.routes.get(engine)
        # Recorded routes are on the rank that recorded them, so their sequences must stay.
        plan = self._plan(engine, batch, directory, rows, may_move=routes is None)
        call = Call("update", function, engine, columns={} if routes is None else {ROUTES: routes})
        result = self._call_on_batch(call, batch, directory, plan)
        if keeps_logprobs:
            found = self._call(Call("take_logprobs", trainer_rank.pop_logprobs, engine, gathers=True))
            # The update's own log-probs cover whole sequences.
            (logprobs,) = restore(replace(batch, spans=None), plan, found, per_sequence=False)
        return replace(result, plan=self._planners[engine].metrics(plan, directory.sequences(batch).lengths), logprobs=logprobs)

    def export_weights(
        self, engine: str, to: GatherTarget = GatherTarget.driver, *, merged: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) for the tensors that ``to`` gives to this rank; the iterator must be exhausted.

        ``merged=False``: without the engine's adapters.

        The call itself makes the other ranks gather and, depending on ``to``, send their tensors
        (``WeightExport.run``). An iterator that was started completes its gathers even if the caller leaves it
        early.
        """
        call = Call("export", partial(trainer_rank.export, to=to, merged=merged), engine)
        self._announce(call)
        # The other ranks do this in ``execute``; the driver's own part runs when the caller reads the stream.
        self.driver.offload_others(engine)
        weights = self.driver.engines[engine].export_weights(to, merged=merged)
        return exhausting(weights, hang_report.track_activity(str(call)))

    def export_adapters(self, engine: str) -> dict[str, Tensor]:
        """The engine's adapters, under the names of peft's files."""
        return self._call(Call("export_adapters", trainer_rank.export_adapters, engine))

    def adapter_config(self, engine: str) -> dict[str, Any]:
        """Content of the adapters' adapter_config.json."""
        return self.driver.engines[engine].export.adapter_config

    def expected_weights(self, engine: str) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor that export_weights gives."""
        return self.driver.engines[engine].expected_weights()

    def set_progress_callback(self, note: Callable[[str], None]) -> None:
        """``note`` receives the progress of a long save."""
        self.driver.note = note

    def save_hf(self, engine: str, folder: str) -> None:
        """Write the model as a Hugging Face folder, which all ranks must see."""
        self._call(Call("save_hf", partial(trainer_rank.save_hf, folder=folder), engine))

    def save_state(self, engine: str, folder: str) -> None:
        """Write weights, optimizer state and schedule. Raises CheckpointSaveError; the group stays usable."""
        self._call(Call("save_state", partial(trainer_rank.save_state, folder=folder), engine))

    def start_save(self, engine: str, folder: str) -> None:
        """``save_state`` in the background: the engine may train meanwhile, and the folder appears with ``finish_saves``.

        Raises CheckpointSaveError.
        """
        self._call(Call("begin_save", partial(trainer_rank.start_save, folder=folder), engine))

    def saves_are_written(self) -> bool:
        """True if ``finish_saves`` would not wait."""
        return all(self._call(Call("report_saves", trainer_rank.report_saves)))

    def finish_saves(self) -> None:
        """Wait for the saves that ``start_save`` started. Raises CheckpointSaveError; the group stays usable."""
        self._call(Call("finish_saves", trainer_rank.finish_saves))

    def load_state(self, engine: str, folder: str) -> None:
        """Continue from a checkpoint of ``save_state``, in this or another layout. Raises CheckpointError; the group stays usable."""
        self._call(Call("load_state", partial(trainer_rank.load_state, folder=folder), engine))

    def heartbeat(self) -> None:
        """Tell the other ranks that the driver is alive: their deadline for the next call starts again."""
        self._call(Call("heartbeat", trainer_rank.heartbeat))

    def topology_of(self, engine: str) -> Topology:
        """This rank's topology in the engine's layout."""
        return self.driver.engines[engine].topology

    def free_memory(self) -> None:
        """Free each rank's device for the server on it, within the models' offload settings."""
        self._call(Call("free_memory", trainer_rank.free_memory))

    @contextmanager
    def stage(self, step: int, name: str) -> Iterator[None]:
        """Attribute the resources that the ranks use in the block to this stage."""
        self._stage = step, name
        self.driver.start_stage(self._stage)
        try:
            yield
        finally:
            self._stage = None
            self.driver.start_stage(None)

    def release(self, step: int | None = None) -> None:
        """Drop the cached sequences of ``step`` on all ranks; None: of every step."""
        ended = [key for key in self._directories if step in (None, key[1])]
        if ended:
            self._call(Call("the end of a step", partial(trainer_rank.release, step=step)))
        for key in ended:
            del self._directories[key]

    def use_by_stage(self) -> dict[StageKey, tuple[ResourceUse, str]]:
        """Resources since the last call: memory and time of all ranks together, and ``rank:seconds`` of each rank's work."""
        accounts = self._call(Call("report_use", trainer_rank.report_use))
        by_rank = seconds_by_rank(accounts)
        return {stage: (use, by_rank[stage]) for stage, use in of_all_ranks(accounts).items()}

    def stop(self) -> None:
        """Let the other ranks leave ``TrainerRank.serve``."""
        self._call(Call("stop", trainer_rank.stop))

    def _directory_of(self, engine: str, batch: PackedBatch) -> CacheDirectory:
        """The directory of the engine's layout and the present step; of one call alone, if the batch belongs to no step."""
        step = None if self._stage is None or not batch.ids else self._stage[0]
        key = self.driver.engines[engine].topology.layout, step
        found = self._directories.get(key)
        if found is None:
            shared = self.transport.shared if self.driver.topology.world_size > 1 else None
            found = CacheDirectory(len(self.driver.replicas[engine].replica_roots), shared, step=step)
            if step is not None:
                self._directories[key] = found
        return found

    def _assign(
        self, engine: str, batch: PackedBatch, directory: CacheDirectory, groups: Sequence[Sequence[int]] = ()
    ) -> None:
        """Assign a replica to every sequence of the batch that has none yet, and balance each of ``groups`` (sequence ids of an update)."""
        sequences, assigned = directory.sequences(batch), directory.assigned
        new = {key: length for key, length in zip(sequences.keys, sequences.lengths, strict=True) if key not in assigned}
        if not new:
            return
        # As in ``CacheDirectory.sequences``: the key of a step's sequence is its id and its length.
        key_of: dict[int, Any] = {key[0]: key for key in new}  # type: ignore[index]
        parts = [[key_of[id] for id in group if id in key_of] for group in groups]
        nodes = partial(self.transport.nodes, self.driver.replicas[engine])
        preferences = PlacementPreferences.of(batch, sequences.keys, nodes)
        # Sequences assigned earlier keep their replica, which already has their tokens.
        assigned |= self._planners[engine].homes(new, parts, preferences)

    def _plan(
        self,
        engine: str,
        batch: PackedBatch,
        directory: CacheDirectory,
        rows: Sequence[int] | None = None,
        *,
        may_move: bool = False,
    ) -> Plan:
        """Micro-batches of the batch's sequences ``rows``; None: of all."""
        sequences = directory.sequences(batch)
        rows = range(len(sequences.lengths)) if rows is None else rows
        homes = None
        if directory.step is not None:
            self._assign(engine, batch, directory)
            homes = [directory.assigned[sequences.keys[row]] for row in rows]
        plan = self._planners[engine].plan([sequences.lengths[row] for row in rows], homes, may_move=may_move)
        return [[[rows[index] for index in indices] for indices in of] for of in plan]

    def _call_on_batch(self, call: Call, batch: PackedBatch, directory: CacheDirectory, plan: Plan) -> Any:
        """``_call`` on the micro-batches of ``plan``; the ranks get the rows that they lack."""
        columns = {name: directory.column(values) for name, values in batch.columns().items()}
        payloads = directory.payloads(batch, plan, list(columns.values()))
        return self._call(replace(call, columns=columns | dict(call.columns or {}), step=directory.step), payloads)

    def _call(self, call: Call, payloads: Sequence[Payload] | None = None) -> Any:
        """The driver's own result, or the results that the call gathers."""
        reaches = self.transport.reaches(self.driver.replicas[call.engine]) if call.engine else ()
        self._announce(call)
        return self.driver.execute(call, payloads, reaches)

    def _announce(self, call: Call) -> None:
        collectives.broadcast_object(replace(call, stage=self._stage), what=str(call))
