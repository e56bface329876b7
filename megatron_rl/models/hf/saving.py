"""Saves a Hugging Face folder from all ranks: each rank writes its own files, rank 0 index, config.json and tokenizer.

All ranks wait until rank 0 has created the folder, then only for the peers with which they assemble tensors. Rank 0 waits
for the slowest rank, and all ranks wait until rank 0 has renamed the folder. A write error of one rank is raised on all
ranks, after each rank has exhausted its tensors.
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
"""Slowest expected storage of a rank, which sets the timeout of the other ranks."""
_REPORT_S = 10.0


@dataclass(frozen=True)
class SharedSave:
    """One save; the same on every rank."""

    target: Path
    files: Sequence[Sequence[Sequence[TensorSpec]]]
    """For each rank, its files; for each file, the specs of its tensors in order."""
    finish: Callable[[Path], None]
    """Called on rank 0 to rename the files in the folder and to write the remaining files. Raises OSError."""
    progress: Callable[[str], None]
    """Called on rank 0 with a message every few seconds."""

    def run(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Save ``tensors``, this rank's share of the plan; collective. Raises OSError on every rank."""
        rank = dist.get_rank()
        failure = self._lead(tensors) if rank == 0 else ""
        if rank != 0 and (folder := collectives.broadcast_object(None, what=self._what)):
            self._write_own(Path(folder), tensors)
        failure = collectives.broadcast_object(failure, what=self._what, timeout_s=self._timeout_s)
        if failure:
            raise OSError(f"{self.target} could not be written: {failure}")

    @property
    def _what(self) -> str:
        return f"this rank's part of the saved model {self.target}"

    @property
    def _timeout_s(self) -> float:
        largest = max(sum(header.num_bytes for file in files for header in file) for files in self.files)
        return control_plane().timeout_s + largest / _SLOWEST_BYTES_PER_S

    def _lead(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Save on rank 0; returns the error message of any rank, or an empty string."""
        is_announced = False
        try:
            with atomic_folder(self.target) as folder:
                collectives.broadcast_object(str(folder), what=self._what)
                is_announced = True
                failures = self._write_own(folder, tensors)
                if any(failures):
                    raise OSError("; ".join(f"rank {rank}: {error}" for rank, error in enumerate(failures) if error))
                self.finish(folder)
        except OSError as error:
            # The other ranks wait for the folder's name: an empty name reports that there is none.
            if not is_announced:
                collectives.broadcast_object("", what=self._what)
            return str(error)
        return ""

    def _write_own(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Write this rank's files; returns the error messages of all ranks (empty strings for none) on rank 0."""
        rank, failure = dist.get_rank(), ""
        writer = RankWriter(folder, rank, self.files[rank])
        reported_at = time.monotonic()
        for name, tensor in tensors:
            # After a failure the remaining tensors are still iterated, because assembling them is collective.
            if failure:
                continue
            try:
                writer.add(name, tensor)
            except OSError as error:
                failure = str(error)
            if rank == 0 and time.monotonic() - reported_at > _REPORT_S:
                reported_at = time.monotonic()
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
