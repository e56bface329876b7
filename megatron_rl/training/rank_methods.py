"""A rank's part of each command of the driver (``trainer_group.py``), with the micro-batches that came with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.training import losses
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.microbatch_io import select_spans
from megatron_rl.training.model_checkpoint import CheckpointError, CheckpointSaveError
from megatron_rl.training.sequence_cache import RankBatch

if TYPE_CHECKING:
    from megatron_rl.training.trainer_group import TrainerRank


def logprobs(
    worker: "TrainerRank", engine: Engine, share: RankBatch, *, temperature: float, answer: int, routes: int | None
) -> Tensor | None:
    logprobs = engine.logprobs(share.microbatches, temperature=temperature, record_routes=routes is not None)
    share.keep(answer, logprobs)
    if routes is not None:
        # Most models have few enough experts for half the bytes.
        fits = (engine.chunks[0].config.num_moe_experts or 0) < torch.iinfo(torch.uint8).max
        share.keep(routes, [part.to(torch.uint8 if fits else torch.int16) for part in engine.pop_routes()])
    return _joined(engine, _for_the_driver(share, logprobs))


def values(worker: "TrainerRank", engine: Engine, share: RankBatch) -> Tensor | None:
    found = engine.values(share.microbatches)
    values = _for_the_driver(share, [values for values, _ in found])
    return _joined(engine, [part for (_, final), own in zip(found, values, strict=True) for part in (own, final)])


def update(
    worker: "TrainerRank",
    engine: Engine,
    share: RankBatch,
    *,
    objective: str,
    denominators: dict[str, float],
    temperature: float,
    keeps_logprobs: bool,
) -> UpdateResult:
    loss = losses.build(objective, worker.config.algorithm, denominators, is_own_old=keeps_logprobs)
    return engine.update(share.microbatches, loss, temperature=temperature, keeps_logprobs=keeps_logprobs)


def pop_logprobs(worker: "TrainerRank", engine: Engine, share: RankBatch) -> Tensor | None:
    return _joined(engine, engine.pop_logprobs())


def export(worker: "TrainerRank", engine: Engine, share: RankBatch, *, to: GatherTarget) -> None:
    worker.export.run(engine, to)


def save_hf(worker: "TrainerRank", engine: Engine, share: RankBatch, *, folder: str) -> None:
    engine.save_hf(folder, worker.note)


def save_state(worker: "TrainerRank", engine: Engine, share: RankBatch, *, folder: str) -> None:
    with _raise_on_driver(worker):
        engine.save_state(folder)


def start_save(worker: "TrainerRank", engine: Engine, share: RankBatch, *, folder: str) -> None:
    with _raise_on_driver(worker):
        engine.start_save(folder, in_background=True)


def load_state(worker: "TrainerRank", engine: Engine, share: RankBatch, *, folder: str) -> None:
    with _raise_on_driver(worker):
        engine.load_state(folder)


@contextmanager
def _raise_on_driver(worker: "TrainerRank") -> Iterator[None]:
    """Of what all ranks raise about a checkpoint, the driver's is enough: it decides how to go on."""
    try:
        yield
    except (CheckpointError, CheckpointSaveError):
        if worker.topology.rank == 0:
            raise


def _for_the_driver(share: RankBatch, parts: Sequence[Tensor]) -> list[Tensor]:
    """Of each micro-batch's numbers [T] those of its spans; ranks before the last stage have none."""
    return [select_spans(batch, part) for batch, part in zip(share.microbatches, parts, strict=False)]


def _joined(engine: Engine, parts: Sequence[Tensor]) -> Tensor | None:
    """What an output rank reports: its parts end to end."""
    if not engine.is_output_rank:
        return None
    return torch.cat([part.cpu() for part in parts]) if parts else torch.zeros(0)
