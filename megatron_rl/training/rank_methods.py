"""The functions of the driver's calls (``trainer_group.py``), as each rank runs them: on its own micro-batches, or on none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.parallel import collectives
from megatron_rl.training import losses
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.export import free_cached_memory
from megatron_rl.training.microbatch_io import select_spans
from megatron_rl.training.model_checkpoint import CheckpointError, CheckpointSaveError
from megatron_rl.training.sequence_cache import RankBatch
from megatron_rl.training.trainer_rank import TrainerRank


def logprobs(
    rank: TrainerRank, engine: Engine, batch: RankBatch, *, temperature: float, answer: int, routes: int | None
) -> Tensor | None:
    logprobs = engine.logprobs(batch.microbatches, temperature=temperature, record_routes=routes is not None)
    batch.keep(answer, logprobs)
    if routes is not None:
        # Most models have few enough experts for half the bytes.
        fits = (engine.chunks[0].config.num_moe_experts or 0) < torch.iinfo(torch.uint8).max
        batch.keep(routes, [part.to(torch.uint8 if fits else torch.int16) for part in engine.pop_routes()])
    return _joined(engine, _for_the_driver(batch, logprobs))


def values(rank: TrainerRank, engine: Engine, batch: RankBatch) -> Tensor | None:
    found = engine.values(batch.microbatches)
    values = _for_the_driver(batch, [values for values, _ in found])
    return _joined(engine, [part for (_, final), own in zip(found, values, strict=True) for part in (own, final)])


def update(
    rank: TrainerRank,
    engine: Engine,
    batch: RankBatch,
    *,
    objective: str,
    denominators: dict[str, float],
    temperature: float,
    keeps_logprobs: bool,
) -> UpdateResult:
    loss = losses.build(objective, rank.config.algorithm, denominators, is_own_old=keeps_logprobs)
    return engine.update(batch.microbatches, loss, temperature=temperature, keeps_logprobs=keeps_logprobs)


def pop_logprobs(rank: TrainerRank, engine: Engine, batch: RankBatch) -> Tensor | None:
    return _joined(engine, engine.pop_logprobs())


def export(rank: TrainerRank, engine: Engine, batch: RankBatch, *, to: GatherTarget) -> None:
    rank.export.run(engine, to)


def save_hf(rank: TrainerRank, engine: Engine, batch: RankBatch, *, folder: str) -> None:
    engine.save_hf(folder, rank.note)


def save_state(rank: TrainerRank, engine: Engine, batch: RankBatch, *, folder: str) -> None:
    with _raise_on_driver(rank):
        engine.save_state(folder)


def start_save(rank: TrainerRank, engine: Engine, batch: RankBatch, *, folder: str) -> None:
    with _raise_on_driver(rank):
        engine.start_save(folder, in_background=True)


def load_state(rank: TrainerRank, engine: Engine, batch: RankBatch, *, folder: str) -> None:
    with _raise_on_driver(rank):
        engine.load_state(folder)


def heartbeat(rank: TrainerRank) -> None:
    """Nothing: a rank that has received the call waits for the next one with a full deadline."""


def free_memory(rank: TrainerRank) -> None:
    """Leave the device to the servers on it: offload all models and return the unused memory of the allocators."""
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
    """Make the checkpoints that were saved in the background appear."""
    problems = []
    for engine in rank.engines.values():
        try:
            engine.finish_save()
        except CheckpointSaveError as error:
            problems.append(str(error))  # the next engine's save is on its way, too
    if problems and rank.topology.rank == 0:
        raise CheckpointSaveError("; ".join(problems))


def release(rank: TrainerRank, *, step: int | None) -> None:
    """Drop the cached sequences of ``step``; None: of every step."""
    rank.caches.release(step)


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


def _for_the_driver(batch: RankBatch, parts: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of each micro-batch's spans, from its numbers [T]; ranks before the last stage have none."""
    return [select_spans(microbatch, part) for microbatch, part in zip(batch.microbatches, parts, strict=False)]


def _joined(engine: Engine, parts: Sequence[Tensor]) -> Tensor | None:
    """The report of an output rank: its parts end to end."""
    if not engine.is_output_rank:
        return None
    return torch.cat([part.cpu() for part in parts]) if parts else torch.zeros(0)
