"""One rank's files of a Megatron checkpoint, written at once or by a thread while training goes on.

Megatron plans a save (``dist_checkpointing.save`` with ``async_sharded_save``) and leaves the writing to its caller. Its own
callers fork a process for it, also for a save that is waited for. Here it is a thread: a fork of a process that holds
servers' pipes and sockets would outlive a kill, and torch writes without Python's lock. What a thread writes is copied
into host memory first, since the next update changes weights and optimizer in place.
"""

import logging
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_rl.system.files.checksums import Checksums, checksums
from megatron_rl.system.processes.host_memory import available_bytes_per_rank

logger = logging.getLogger(__name__)

_COPY_MARGIN = 1.25


class CheckpointWriter:
    """Begins with its making; ``wait`` comes before ``finalize``."""

    def __init__(self, request: AsyncRequest, folder: Path, *, in_background: bool) -> None:
        self.checksums: Checksums = {}
        """Checksums of the files, after they are written."""
        self.finalize: list[Callable[[], None]] = request.finalize_fns
        """To be called by all ranks in this order, once all have written."""
        self._folder = folder
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        if request.async_fn is None:  # this rank has nothing to write
            return
        (transforms, _), (_, self._files, self._results) = request.async_fn.args, request.async_fn_args
        if in_background and self._has_room():
            self._copy()
            self._thread = Thread(target=self._write, args=(transforms,), name="checkpoint", daemon=True)
            self._thread.start()
            return
        self._files[:] = request.preload_fn()
        self._write(transforms)

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank has written; raises its failure."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _has_room(self) -> bool:
        needed = sum(tensor.nbytes for _, _, (_, tensors) in self._files for _, tensor in tensors)
        room = available_bytes_per_rank()
        if needed * _COPY_MARGIN <= room:
            return True
        logger.warning(
            "a checkpoint is written while training waits: a copy of %.1f GB on this rank has no room in the %.1f GB of host "
            "memory that are left for it",
            needed / 1e9,
            room / 1e9,
        )
        return False

    def _copy(self) -> None:
        for _, _, (_, tensors) in self._files:
            # One by one in place: what was gathered for the save alone is given back on the way.
            for index, (item, tensor) in enumerate(tensors):
                tensors[index] = (item, tensor.detach().to("cpu", copy=True))

    def _write(self, transforms: list[Any]) -> None:
        try:
            with ThreadPoolExecutor(len(self._files)) as threads:
                written = dict(threads.map(lambda job: _write_file(transforms, *job), enumerate(self._files)))
            self.checksums = checksums(self._folder, [name for _, name, _ in self._files])
            self._results.put(written)
        except Exception as error:  # whatever it was, the other ranks must learn of it
            self._failure = error
        # Megatron counts them once more when it finalises, and no longer looks inside.
        self._files[:] = [(path, name, ([], [])) for path, name, _ in self._files]


def _write_file(transforms: list[Any], index: int, file: Any) -> tuple[int, Any]:
    """(index, Megatron's account of what was written). Raises what went wrong."""
    results: queue.Queue = queue.Queue()
    count: queue.Queue = queue.Queue()
    count.put(index)
    FileSystemWriterAsync.write_preloaded_data(transforms, index, file, results, count, use_fsync=True)
    _, written = results.get_nowait()
    if isinstance(written, Exception):
        raise written
    return index, written
