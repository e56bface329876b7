"""Checkpoints of one model in Megatron's distributed format (torch_dist): weights, optimizer state, schedule.

Invariants: a folder with the final name is complete (it is written under another name and renamed); a resumed run
is bitwise equal for the same layout, and equal up to rounding for another layout, because the optimizer state is
stored in the shape of the weights; no rank ever has more than its own share of that state; hyperparameters come
from the configuration, never from the checkpoint; before anything is loaded, every file is compared with its
writer's checksums, and no pickle may import anything that a checkpoint does not need. A checkpoint may be written
while training continues (``CheckpointWrite``). All ranks call each function together and wait for each other at its
barriers, for at most the collective time-out. The folder must be on a file system that all ranks share.
"""

import json
import logging
import os
import queue
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.errors import UserError
from megatron_rl.models.hf.adapter_folder import write_adapter_config
from megatron_rl.models.layers.torch_layers import PackedGPTModel
from megatron_rl.models.lora import sharded_adapters
from megatron_rl.models.torch_dist import check_metadata
from megatron_rl.parallel import collectives
from megatron_rl.parallel.collectives import CollectiveTimeout, PeerLost
from megatron_rl.system.files.atomic_files import (
    Checksums,
    checksums,
    damaged,
    parse_checksums,
    replace_folder,
    write_atomic,
)
from megatron_rl.system.files.probes import UnsafePickle
from megatron_rl.system.megatron_core import save_options, write_common
from megatron_rl.system.processes.host_memory import available_bytes_per_rank
from megatron_rl.training.optimizer import set_num_steps, sharded_state

logger = logging.getLogger(__name__)

_FORMAT = {"singleton_local_shards": False}
_SMALLEST_BYTES = 1 << 20
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_COPY_MARGIN = 1.25
_FILES_PER_RANK = 2
"""Written at a time; Megatron's default differs between its releases."""
_CHECKSUMS_FILE = "checksums.json"


class CheckpointSaveError(UserError):
    """Raised on every rank if a checkpoint could not be written (a full disk, for example); nothing of it remains."""


class CheckpointError(UserError):
    """A checkpoint that is damaged, or that cannot be continued in this layout. Every rank raises it."""


class CheckpointWrite:
    """A checkpoint that is being written; nothing of the model is read any more.

    Megatron plans a save (``dist_checkpointing.save`` with ``async_sharded_save``) and leaves the writing to its
    caller. Megatron's own callers fork a process, also for a save that is waited for. Here a thread writes: a
    forked process would keep the servers' pipes and sockets open after a kill, and torch writes without Python's
    lock.
    """

    def __init__(self, folder: Path, partial: Path, request: AsyncRequest, *, in_background: bool) -> None:
        """Write this rank's files to ``partial``: before this returns, or ``in_background`` from a copy in host memory."""
        self._folder, self._partial = folder, partial
        self._finalize: list[Callable[[], None]] = request.finalize_fns
        self._checksums: Checksums = {}
        """Checksums of this rank's files, after they are written."""
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        if request.async_fn is None:  # this rank has nothing to write
            return
        (transforms, _), (_, self._files, self._results) = request.async_fn.args, request.async_fn_args
        if in_background and _has_host_memory(self._files):
            # The next update changes weights and optimizer in place.
            _copy_to_host(self._files)
            self._thread = Thread(target=self._write, args=(transforms,), name="checkpoint", daemon=True)
            self._thread.start()
            return
        self._files[:] = request.preload_fn()
        self._write(transforms)

    @property
    def is_written(self) -> bool:
        """True if ``finish`` would not wait for this rank."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for all ranks and give the folder its name; a folder of that name is replaced. Collective; CheckpointSaveError."""
        rank, text = dist.get_rank(), f"{self._folder} could not be written"
        with _gone_if_not_saved(self._partial):
            # Before Megatron's part: there the ranks wait at a barrier for one that has failed.
            with _raised_together(CheckpointSaveError, text):
                self._wait()
            with _raised_together(CheckpointSaveError, text):
                # Collective, so in the same order on all ranks, and after all of them have written.
                for finalize in self._finalize:
                    finalize()
            with _raised_together(CheckpointSaveError, text):
                _write_checksums(self._partial, self._checksums)
                if rank == 0:
                    replace_folder(self._partial, self._folder)

    def _wait(self) -> None:
        """Wait until this rank has written; raises its failure."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _write(self, transforms: list[Any]) -> None:
        try:
            with ThreadPoolExecutor(len(self._files)) as threads:
                written = dict(threads.map(lambda job: _write_file(transforms, *job), enumerate(self._files)))
            self._checksums = checksums(self._partial, [name for _, name, _ in self._files])
            self._results.put(written)
        except Exception as error:  # of any kind: the other ranks must learn of the failure
            self._failure = error
        # Megatron counts the files again when it finalizes, and no longer reads their tensors.
        self._files[:] = [(path, name, ([], [])) for path, name, _ in self._files]


def _has_host_memory(files: list[Any]) -> bool:
    """True if host memory has capacity for a copy of the tensors of ``files``; else logs a warning."""
    needed = sum(tensor.nbytes for _, _, (_, tensors) in files for _, tensor in tensors)
    available = available_bytes_per_rank()
    if needed * _COPY_MARGIN <= available:
        return True
    logger.warning(
        "a checkpoint is written while training waits: a copy of %.1f GB on this rank has no room in the %.1f GB of host "
        "memory that are left for it",
        needed / 1e9,
        available / 1e9,
    )
    return False


def _copy_to_host(files: list[Any]) -> None:
    for _, _, (_, tensors) in files:
        # In place, so that a tensor gathered for the save alone is freed before the next one is copied.
        for index, (item, tensor) in enumerate(tensors):
            tensors[index] = (item, tensor.detach().to("cpu", copy=True))


def _write_file(transforms: list[Any], index: int, file: Any) -> tuple[int, Any]:
    """(index, Megatron's results of the write). Raises the error of the write."""
    results: queue.Queue = queue.Queue()
    count: queue.Queue = queue.Queue()
    count.put(index)
    FileSystemWriterAsync.write_preloaded_data(transforms, index, file, results, count, use_fsync=True)
    _, written = results.get_nowait()
    if isinstance(written, Exception):
        raise written
    return index, written


def start_checkpoint(
    folder: str | Path,
    chunks: Sequence[PackedGPTModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    in_background: bool,
    adapters: Mapping[str, Any] | None = None,
) -> CheckpointWrite:
    """Start to write ``folder``, which appears with ``finish``. Raises CheckpointSaveError.

    ``adapters``: adapter_config.json of a model with adapters, for ``convert``.
    ``in_background``: once this returns the model may train; a rank without host memory for a copy of its share
    writes the share before this returns.
    """
    folder = Path(folder)
    partial, text = folder.with_name(folder.name + ".partial"), f"{folder} could not be written"
    with _gone_if_not_saved(partial):
        with _raised_together(CheckpointSaveError, text):
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
                # The folder is new: what a killed run left under this name is gone.
                partial.mkdir(parents=True)
                _check_room(partial)
                if adapters:
                    write_adapter_config(partial, adapters)
        with _raised_together(CheckpointSaveError, text):
            request = _plan(partial, chunks, optimizer, scheduler)
            return CheckpointWrite(folder, partial, request, in_background=in_background)


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
    # Megatron's own queue belongs to a helper process, which would outlive a killed rank. Here only this process reads the
    # queue, one per save.
    filesystem_async._results_queue = queue.Queue()
    files = get_default_save_sharded_strategy("torch_dist")
    files.thread_count = _FILES_PER_RANK
    strategy = FullyParallelSaveStrategyWrapper(files, _data_parallel_group(), do_cache_distribution=False)
    common = {"num_optimizer_steps": scheduler.num_steps}
    state = {**_sharded_state(chunks, optimizer), **common}
    request = dist_checkpointing.save(state, str(folder), strategy, content_metadata=_FORMAT, **save_options())
    if dist.get_rank() == 0:
        write_common({**common, "content_metadata": _FORMAT}, folder)
    return request


def load_checkpoint(
    folder: str | Path,
    chunks: Sequence[PackedGPTModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Restore in place a checkpoint of ``start_checkpoint``, from the same or another parallel layout.

    Raises CheckpointError if the checkpoint is missing, incomplete, damaged or of another model.
    """
    folder = Path(folder)
    # All ranks agree first: in Megatron's collectives they would wait forever for a rank that has stopped.
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
        # In place, because the sharded state refers to the weights and the optimizer's own tensors.
        state = dist_checkpointing.load(_sharded_state(chunks, optimizer), str(folder))
        for index, chunk in enumerate(chunks):
            # Only adapters, and what trains beside them, if the model has adapters.
            chunk.load_state_dict(state[_chunk_key(index)], strict=not sharded_adapters(chunk))
    # Through step(), because only that also sets the learning rate of the optimizer's groups.
    scheduler.num_steps = 0
    scheduler.step(state["num_optimizer_steps"])
    set_num_steps(optimizer, scheduler.num_steps)


def _write_checksums(folder: Path, own: Checksums) -> None:
    """``own``: checksums of this rank's files. Rank 0 adds those of the common files, and writes the checksums file."""
    rank = dist.get_rank()
    found = collectives.gather_objects(own, what=f"its checksums of {folder}")
    if rank == 0:
        sums = {name: checksum for part in found for name, checksum in part.items()}
        sums |= checksums(folder, [file.name for file in folder.iterdir() if file.name not in sums])
        write_atomic(folder / _CHECKSUMS_FILE, json.dumps(sums))


def _problems(folder: Path) -> Iterator[str]:
    """Problems of this rank's share of the files; every file belongs to the share of one rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if not (folder / "metadata.json").is_file():
        yield f"{folder} holds no whole checkpoint; give the folder that a save ended in"
        return
    try:
        expected = parse_checksums(json.loads((folder / _CHECKSUMS_FILE).read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        yield f"{folder / _CHECKSUMS_FILE} cannot be read: {error}"
        return
    # The largest files first, in turn over the ranks, so that all ranks read about equally many bytes.
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
    # The ranks cannot agree over a control group that has just failed.
    except (CollectiveTimeout, PeerLost):
        raise
    except CheckpointError as error:
        problem = str(error)
    # Libraries under Megatron raise many kinds of errors on a full disk or another model's files; torch's is not an Exception.
    except (Exception, CheckpointException) as error:
        problem = f"{text}: {_one_line(error)}"
    _agree(problem, kind)


def _agree(problem: str, kind: type[UserError]) -> None:
    problems = collectives.gather_objects(problem, what="whether its part of the checkpoint is complete")
    said = collectives.broadcast_object(
        "\n".join(dict.fromkeys(filter(None, problems))), what="whether the checkpoint is complete"
    )
    if said:
        raise kind(said)


def _one_line(error: BaseException) -> str:
    """The error in one line: the first of the ranks' failures, which torch wraps."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _check_room(folder: Path) -> None:
    """Raise OSError on a full disk before the ranks write together: a rank that fails alone leaves the others waiting."""
    probe = folder / ".probe"
    with open(probe, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _SMALLEST_BYTES)
    probe.unlink()


@contextmanager
def _only_tensors_unpickled() -> Iterator[None]:
    """Make torch unpickle only plain data and tensors inside; by default it unpickles any object of a checkpoint."""
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
    weights = {_chunk_key(index): _trained_weights(chunk, metadata) for index, chunk in enumerate(chunks)}
    return {**weights, "optimizer": sharded_state(optimizer, weights)}


def _trained_weights(chunk: PackedGPTModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """Sharded weights of the chunk; if it has adapters, without the base model, which never changes."""
    weights, adapters = chunk.sharded_state_dict(metadata=metadata), sharded_adapters(chunk)
    if not adapters:
        return weights
    trains = (ShardedTensor, ShardedTensorFactory)
    kept = {name: value for name, value in weights.items() if isinstance(value, trains) and value.data.requires_grad}
    return {name: value for name, value in kept.items() if name not in adapters} | adapters


def _chunk_key(index: int) -> str:
    """Key of a chunk inside the state dict; in the files a tensor has its global name, independent of the chunk."""
    return f"model{index}"


def _data_parallel_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
