"""A rank's part of each command of the driver (``trainer_group.py``), with the micro-batches that came with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.models.hf.gathering import Destination
from megatron_rl.training import losses
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.model_checkpoint import CheckpointError, CheckpointNotSaved
from megatron_rl.training.payloads import within_spans
from megatron_rl.training.sequence_cache import Share

if TYPE_CHECKING:
    from megatron_rl.training.trainer_group import Worker


def logprobs(
    worker: "Worker", engine: Engine, share: Share, *, temperature: float, answer: int, routes: int | None
) -> Tensor | None:
    logprobs = engine.logprobs(share.microbatches, temperature=temperature, record_routes=routes is not None)
    share.keep(answer, logprobs)
    if routes is not None:
        # Most models have few enough experts for half the bytes.
        fits = (engine.chunks[0].config.num_moe_experts or 0) < torch.iinfo(torch.uint8).max
        share.keep(routes, [part.to(torch.uint8 if fits else torch.int16) for part in engine.take_routes()])
    return _joined(engine, _for_the_driver(share, logprobs))


def values(worker: "Worker", engine: Engine, share: Share) -> Tensor | None:
    found = engine.values(share.microbatches)
    values = _for_the_driver(share, [values for values, _ in found])
    return _joined(engine, [part for (_, final), own in zip(found, values, strict=True) for part in (own, final)])


def update(
    worker: "Worker",
    engine: Engine,
    share: Share,
    *,
    objective: str,
    denominators: dict[str, float],
    temperature: float,
    keeps_logprobs: bool,
) -> UpdateResult:
    loss = losses.build(objective, worker.config.algorithm, denominators, is_own_old=keeps_logprobs)
    return engine.update(share.microbatches, loss, temperature=temperature, keeps_logprobs=keeps_logprobs)


def take_logprobs(worker: "Worker", engine: Engine, share: Share) -> Tensor | None:
    return _joined(engine, engine.take_logprobs())


def export(worker: "Worker", engine: Engine, share: Share, *, to: Destination) -> None:
    worker.export.take_part(engine, to)


def save_hf(worker: "Worker", engine: Engine, share: Share, *, folder: str) -> None:
    engine.save_hf(folder, worker.note)


def save_state(worker: "Worker", engine: Engine, share: Share, *, folder: str) -> None:
    with _said_by_the_driver(worker):
        engine.save_state(folder)


def begin_save(worker: "Worker", engine: Engine, share: Share, *, folder: str) -> None:
    with _said_by_the_driver(worker):
        engine.begin_save(folder, in_background=True)


def load_state(worker: "Worker", engine: Engine, share: Share, *, folder: str) -> None:
    with _said_by_the_driver(worker):
        engine.load_state(folder)


@contextmanager
def _said_by_the_driver(worker: "Worker") -> Iterator[None]:
    """Of what all ranks raise about a checkpoint, the driver's is enough: it decides how to go on."""
    try:
        yield
    except (CheckpointError, CheckpointNotSaved):
        if worker.topology.rank == 0:
            raise


def _for_the_driver(share: Share, parts: Sequence[Tensor]) -> list[Tensor]:
    """Of each micro-batch's numbers [T] those of its spans; ranks before the last stage have none."""
    return [within_spans(batch, part) for batch, part in zip(share.microbatches, parts, strict=False)]


def _joined(engine: Engine, parts: Sequence[Tensor]) -> Tensor | None:
    """What an output rank reports: its parts end to end."""
    if not engine.is_output_rank:
        return None
    return torch.cat([part.cpu() for part in parts]) if parts else torch.zeros(0)
