"""A Hugging Face folder that all ranks write together: each its own files, rank 0 the index, config.json and the tokenizer.

Who waits for whom: the ranks for the folder that rank 0 makes, then only for the peers with which they put tensors
together; rank 0 for the slowest rank, and all for rank 0, which gives the folder its name. What one rank cannot write is
raised on all of them, after each has walked its tensors to their end.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_rl.families.parameters import TensorSpec
from megatron_rl.models.hf.shards import RankWriter
from megatron_rl.parallel import collectives
from megatron_rl.parallel.topology import control_plane
from megatron_rl.system.files.atomic_files import atomic_folder

_SLOWEST_BYTES_PER_S = 50e6
"""Of a rank's storage: how long the others wait for it."""
_REPORT_S = 10.0


@dataclass(frozen=True)
class SharedSave:
    """One save; the same on every rank."""

    target: Path
    files: Sequence[Sequence[Sequence[TensorSpec]]]
    """By rank: its files, and the tensors of each in their order."""
    finish: Callable[[Path], None]
    """On rank 0: gives the files in the folder their names and writes the rest of it. Raises OSError."""
    progress: Callable[[str], None]
    """Told on rank 0 now and then."""

    def run(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """``tensors``: this rank's own, as planned. Raises OSError on every rank."""
        rank = dist.get_rank()
        failure = self._lead(tensors) if rank == 0 else ""
        if rank != 0 and (folder := collectives.broadcast_object(None, what=self._what)):
            self._write_own(Path(folder), tensors)
        failure = collectives.broadcast_object(failure, what=self._what, timeout_s=self._timeout_s)
        if failure:
            raise OSError(f"{self.target} could not be written: {failure}")

    @property
    def _what(self) -> str:
        return f"its part of the saved model {self.target}"

    @property
    def _timeout_s(self) -> float:
        most = max(sum(header.num_bytes for file in files for header in file) for files in self.files)
        return control_plane().timeout_s + most / _SLOWEST_BYTES_PER_S

    def _lead(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        is_told = False
        try:
            with atomic_folder(self.target) as folder:
                collectives.broadcast_object(str(folder), what=self._what)
                is_told = True
                failures = self._write_own(folder, tensors)
                if any(failures):
                    raise OSError("; ".join(f"rank {rank}: {said}" for rank, said in enumerate(failures) if said))
                self.finish(folder)
        except OSError as error:
            if not is_told:
                collectives.broadcast_object("", what=self._what)
            return str(error)
        return ""

    def _write_own(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """What went wrong, by rank, on rank 0."""
        rank, failure = dist.get_rank(), ""
        writer = RankWriter(folder, rank, self.files[rank])
        said_at = time.monotonic()
        for name, tensor in tensors:
            # After a failure the tensors are still taken: the peers of this rank would wait for it otherwise.
            if failure:
                continue
            try:
                writer.add(name, tensor)
            except OSError as error:
                failure = str(error)
            if rank == 0 and time.monotonic() - said_at > _REPORT_S:
                said_at = time.monotonic()
                total = sum(header.num_bytes for files in self.files for file in files for header in file)
                self.progress(
                    f"saving {self.target}: rank 0 has written {writer.num_bytes / 1e9:.1f} of its "
                    f"{writer.total_bytes / 1e9:.1f} GB; {total / 1e9:.1f} GB in all"
                )
        try:
            writer.close()
        except OSError as error:
            failure = failure or str(error)
        return collectives.gather_objects(failure, what=self._what, timeout_s=self._timeout_s)
