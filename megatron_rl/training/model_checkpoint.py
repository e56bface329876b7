"""Checkpoints of one model in Megatron's distributed format (torch_dist): weights, optimizer state, schedule.

Invariants: a folder of the final name is complete (it is written under another name and renamed); a resumed run is bitwise equal
for the same layout, and equal up to rounding for another one, because the optimizer state is stored in the shape of the
weights; no rank ever holds more of it than its own share; hyperparameters come from the configuration, never from the
checkpoint; before anything is loaded, every file has been compared with the checksums that its writer left, and no pickle
may import what a checkpoint does not need. A checkpoint may be written while the model trains on (``checkpoint_writer.py``). All
ranks call each function together and wait for each other at its barriers, for at most the collective time-out. The folder must be
on a file system that all ranks share.
"""

import json
import os
import queue
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.errors import UserError
from megatron_rl.models.layers.gpt import PackedGPTModel
from megatron_rl.models.torch_dist import check_metadata
from megatron_rl.parallel import collectives
from megatron_rl.parallel.collectives import CollectiveTimeout, PeerLost
from megatron_rl.system.files.atomic_files import replace_folder, write_atomic
from megatron_rl.system.files.checksums import Checksums, checksums, damaged, parse_checksums
from megatron_rl.system.files.pickle_check import UnsafePickle
from megatron_rl.training.checkpoint_writer import CheckpointWriter
from megatron_rl.training.optimizer import set_num_steps
from megatron_rl.training.optimizer_shards import sharded_state

_FORMAT = {"singleton_local_shards": False}
_SMALLEST_BYTES = 1 << 20
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


_CHECKSUMS_FILE = "checksums.json"


class CheckpointSaveError(UserError):
    """Raised on every rank if a checkpoint could not be written (a full disk, for example); nothing of it remains."""


class CheckpointError(UserError):
    """A checkpoint that is damaged, or that cannot be continued in this layout. Every rank raises it."""


class CheckpointWrite:
    """A checkpoint that is being written; nothing of the model is read any more."""

    def __init__(self, folder: Path, partial: Path, files: CheckpointWriter) -> None:
        self._folder, self._partial, self._files = folder, partial, files

    @property
    def is_written(self) -> bool:
        """True if ``finish`` would not wait for this rank."""
        return self._files.is_done

    def finish(self) -> None:
        """Wait for all ranks and give the folder its name; one that has it is replaced. Collective; CheckpointSaveError."""
        rank, text = dist.get_rank(), f"{self._folder} could not be written"
        with _gone_if_not_saved(self._partial):
            # Before Megatron's part: there the ranks wait at a barrier for one that has failed.
            with _raised_together(CheckpointSaveError, text):
                self._files.wait()
            with _raised_together(CheckpointSaveError, text):
                for finalize in self._files.finalize:
                    finalize()
            with _raised_together(CheckpointSaveError, text):
                _write_checksums(self._partial, self._files.checksums)
                if rank == 0:
                    replace_folder(self._partial, self._folder)


def start_checkpoint(
    folder: str | Path,
    chunks: Sequence[PackedGPTModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    in_background: bool,
) -> CheckpointWrite:
    """Begin to write ``folder``, which appears with ``finish``. Raises CheckpointSaveError.

    ``in_background``: once this returns the model may train on; a rank whose host memory has no room for a copy of its
    share writes it at once instead.
    """
    folder = Path(folder)
    partial, text = folder.with_name(folder.name + ".partial"), f"{folder} could not be written"
    with _gone_if_not_saved(partial):
        with _raised_together(CheckpointSaveError, text):
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                _check_room(partial)
        with _raised_together(CheckpointSaveError, text):
            request = _plan(partial, chunks, optimizer, scheduler)
            return CheckpointWrite(folder, partial, CheckpointWriter(request, partial, in_background=in_background))


@contextmanager
def _gone_if_not_saved(partial: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointSaveError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _plan(
    folder: Path,
    chunks: Sequence[PackedGPTModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> AsyncRequest:
    # Megatron hands results over in a queue of a helper process, which outlives a rank that is killed. Here nobody but
    # this process reads the queue, one per save.
    filesystem_async._results_queue = queue.Queue()
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"), _data_parallel_group(), do_cache_distribution=False
    )
    state = _sharded_state(chunks, optimizer)
    state["num_optimizer_steps"] = scheduler.num_steps
    return dist_checkpointing.save(state, str(folder), strategy, content_metadata=_FORMAT, async_sharded_save=True)


def load_checkpoint(
    folder: str | Path,
    chunks: Sequence[PackedGPTModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Restore in place what ``start_checkpoint`` wrote, from the same or another parallel layout.

    Raises CheckpointError where there is no whole checkpoint, and where it is of another model.
    """
    folder = Path(folder)
    _agree("\n".join(_problems(folder)), CheckpointError)
    with (
        _raised_together(CheckpointError, f"{folder} cannot be loaded, is it of another model?"),
        _only_tensors_unpickled(),
    ):
        _load(folder, chunks, optimizer, scheduler)


def _load(
    folder: Path,
    chunks: Sequence[PackedGPTModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    with torch.no_grad():
        # In place: what the sharded state points to are the weights and the optimizer's own tensors.
        state = dist_checkpointing.load(_sharded_state(chunks, optimizer), str(folder))
        for index, chunk in enumerate(chunks):
            chunk.load_state_dict(state[_chunk_key(index)])
    scheduler.num_steps = 0
    scheduler.step(state["num_optimizer_steps"])
    set_num_steps(optimizer, scheduler.num_steps)


def _write_checksums(folder: Path, own: Checksums) -> None:
    """``own``: of this rank's files. Rank 0 adds those of what it has written for all, and writes them down."""
    rank = dist.get_rank()
    found = collectives.gather_objects(own, what=f"its checksums of {folder}")
    if rank == 0:
        sums = {name: checksum for part in found for name, checksum in part.items()}
        sums |= checksums(folder, [file.name for file in folder.iterdir() if file.name not in sums])
        write_atomic(folder / _CHECKSUMS_FILE, json.dumps(sums))


def _problems(folder: Path) -> Iterator[str]:
    """Problems of this rank's share of the files; every file is the share of one rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if not (folder / "metadata.json").is_file():
        yield f"{folder} holds no whole checkpoint; give the folder that a save ended in"
        return
    try:
        expected = parse_checksums(json.loads((folder / _CHECKSUMS_FILE).read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        yield f"{folder / _CHECKSUMS_FILE} cannot be read: {error}"
        return
    by_size = sorted(expected, key=lambda name: expected[name][0], reverse=True)
    yield from damaged(folder, {name: expected[name] for name in by_size[rank::num_ranks]})
    if rank == 0:
        try:
            check_metadata(folder)
        except UnsafePickle as error:
            yield str(error)


@contextmanager
def _raised_together(kind: type[UserError], text: str) -> Iterator[None]:
    """Raise a failure of one rank inside as ``kind`` on all ranks, so that they stay in step."""
    problem = ""
    try:
        yield
    except (CollectiveTimeout, PeerLost):
        raise
    except CheckpointError as error:
        problem = str(error)
    # Whatever the libraries under Megatron make of a full disk or of another model's files; torch's is no Exception.
    except (Exception, CheckpointException) as error:
        problem = f"{text}: {_words(error)}"
    _agree(problem, kind)


def _agree(problem: str, kind: type[UserError]) -> None:
    problems = collectives.gather_objects(problem, what="whether its part of the checkpoint is well")
    said = collectives.broadcast_object(
        "\n".join(dict.fromkeys(filter(None, problems))), what="whether the checkpoint is well"
    )
    if said:
        raise kind(said)


def _words(error: BaseException) -> str:
    """One line; torch wraps the failures of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _check_room(folder: Path) -> None:
    """OSError on a full disk, before the ranks write together: one that fails alone leaves the others waiting."""
    probe = folder / ".probe"
    with open(probe, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _SMALLEST_BYTES)
    probe.unlink()


@contextmanager
def _only_tensors_unpickled() -> Iterator[None]:
    """torch would unpickle the objects among the tensors without limits; inside, it takes plain data and tensors only."""
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before


def _sharded_state(chunks: Sequence[PackedGPTModel], optimizer: MegatronOptimizer) -> dict[str, Any]:
    metadata = {**_FORMAT, "dp_cp_group": _data_parallel_group()}
    weights = {_chunk_key(index): chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}
    return {**weights, "optimizer": sharded_state(optimizer, weights)}


def _chunk_key(index: int) -> str:
    """Keys inside the state dict only; in the files, a tensor goes by its global name, whichever chunk holds it."""
    return f"model{index}"


def _data_parallel_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
