"""Writes Hugging Face model folders (safetensors, config.json, tokenizer), from one process or from all ranks.

A save from all ranks follows a plan that assigns every tensor to a rank, a file and an offset beforehand. Because
of the plan, ranks write in parallel without communication. Each rank has at most two tensors in host memory. Each
rank writes its own safetensors files; rank 0 also writes index, config.json and tokenizer.

All ranks wait until rank 0 has created the folder, then only for the peers with which they assemble tensors. Rank 0
waits for the slowest rank, and all ranks wait until rank 0 has renamed the folder. A write error of one rank is
raised on all ranks, after each rank has exhausted its tensors.
"""

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from io import BufferedWriter
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.families.family import families
from megatron_rl.families.parameters import TensorSpec
from megatron_rl.models.hf.tensor_sources import INDEX_FILE, SINGLE_FILE
from megatron_rl.parallel import collectives
from megatron_rl.parallel.topology import control_plane
from megatron_rl.system.files.atomic_files import atomic_folder

_COPIED_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
)
"""Patterns of the files copied into a saved folder: tokenizer, generation settings and image processor."""


def copy_files(source: Path, target: Path, *further: str) -> None:
    """Copy tokenizer, generation settings, image processor, and files matching ``further``. Raises OSError."""
    for pattern in (*further, *_COPIED_FILES):
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, target)


def uncopied_files(source: Path) -> list[str]:
    """Names of files in ``source`` that neither ``copy_files`` nor a conversion of weights transfers."""
    known = ("config.json", "*.safetensors", INDEX_FILE, "*.distcp", "common.pt", "metadata.json", ".*", *_COPIED_FILES)
    files = sorted(file.name for file in source.iterdir() if file.is_file())
    return [name for name in files if not any(fnmatch(name, pattern) for pattern in known)]


class FolderWriter:
    """Collects tensors into safetensors files of at most ``max_shard_bytes`` in ``folder``."""

    def __init__(
        self, source: Path, folder: Path, *, target: Path, max_shard_bytes: int, keeps_mtp: bool = False
    ) -> None:
        """
        Args:
            source: folder with config.json and the tokenizer.
            folder: the (temporary) folder to write.
            target: the folder's name in error messages.
            max_shard_bytes: largest size of a file, unless a single tensor is larger.
            keeps_mtp: True if multi-token-prediction layers are among the tensors.
        """
        self.source, self.folder, self.target, self.max_shard_bytes = source, folder, target, max_shard_bytes
        self.keeps_mtp = keeps_mtp
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        self.shards: list[list[str]] = []
        self.total_bytes = 0
        self.dtype: torch.dtype | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue a copy of ``tensor``; writes a file once enough tensors are pending. Raises OSError."""
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.max_shard_bytes:
            self._flush()
        # A copy, because the tensor may be the live parameter, or a view that safetensors would refuse.
        self.pending[name] = tensor.detach().cpu().clone()
        self.pending_bytes += size
        self.total_bytes += size
        self.dtype = self.dtype or tensor.dtype

    def adopt(self, path: Path, tensors: Sequence[TensorSpec]) -> None:
        """Add a file of ``folder`` that another rank has written. Raises OSError if the file is missing or too small."""
        size = sum(header.num_bytes for header in tensors)
        if not path.exists() or path.stat().st_size < size:
            raise OSError(
                "a file written by a rank on another node is missing or incomplete on this node; use a folder on a file "
                "system that all ranks share"
            )
        os.rename(path, self._shard_path(len(self.shards)))
        self.shards.append([header.name for header in tensors])
        self.total_bytes += size
        self.dtype = self.dtype or tensors[0].dtype

    def finish(self) -> None:
        """Write the pending tensors, config.json and the tokenizer."""
        self.finish_weights()
        self._write_config()
        copy_files(self.source, self.folder)

    def finish_weights(self) -> None:
        """Write the pending tensors and the index, without config.json and tokenizer."""
        self._flush()
        if len(self.shards) == 1:
            os.rename(self._shard_path(0), self.folder / SINGLE_FILE)
        else:
            weight_map = {}
            for i, names in enumerate(self.shards):
                file = f"model-{i + 1:05d}-of-{len(self.shards):05d}.safetensors"
                os.rename(self._shard_path(i), self.folder / file)
                weight_map.update(dict.fromkeys(names, file))
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2))

    def _flush(self) -> None:
        if not self.pending:
            return
        try:
            save_file(self.pending, self._shard_path(len(self.shards)), metadata={"format": "pt"})
        except SafetensorError as error:
            # SafetensorError carries only the text of an OSError. Unserializable tensors, its other cause, cannot occur here.
            raise OSError(f"{self.target} could not be written: {error}") from error
        self.shards.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def _shard_path(self, index: int) -> Path:
        return self.folder / f"shard-{index}.safetensors"

    def _write_config(self) -> None:
        config = json.loads((self.source / "config.json").read_text())
        # The older name of ``dtype``, whose value may differ.
        config.pop("torch_dtype", None)
        # Quantized weights were read, but none are written.
        config.pop("quantization_config", None)
        count = families()[config["model_type"]].num_mtp_layers
        if config.get(count) and not self.keeps_mtp:
            config[count] = 0
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))


_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Maps dtypes of weights to their names in safetensors."""


def least_loaded(loads: Sequence[int], ranks: Sequence[int], least_bytes: int) -> int:
    """The rank among ``ranks`` that writes the next tensor; ``loads``: bytes per rank so far.

    Loads are compared in units of ``least_bytes``, so that small models are written by few ranks.
    """
    return min(ranks, key=lambda rank: (loads[rank] // least_bytes, rank))


def cut(tensors: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Split the tensors, in order, into files of at most ``max_shard_bytes``; a larger tensor gets a separate file."""
    files: list[list[TensorSpec]] = []
    free_bytes = 0
    for header in tensors:
        if not files or header.num_bytes > free_bytes:
            files.append([])
            free_bytes = max_shard_bytes
        files[-1].append(header)
        free_bytes -= header.num_bytes
    return files


def part_path(folder: Path, rank: int, index: int) -> Path:
    """Temporary path of a rank's file ``index``; rank 0 renames the files when all are complete."""
    return folder / f"rank-{rank}-{index}.safetensors"


class RankWriter:
    """Writes one rank's files. Tensors are added in the plan's order; a thread writes each while the next is gathered."""

    def __init__(self, folder: Path, rank: int, files: Sequence[Sequence[TensorSpec]]) -> None:
        self._next = deque((part_path(folder, rank, index), file) for index, file in enumerate(files))
        self._open: _File | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save-hf")
        self._last: Future[None] | None = None
        self.total_bytes = sum(header.num_bytes for file in files for header in file)
        self.num_bytes = 0
        """Bytes of the tensors added so far."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue a tensor for writing. Waits for the previous tensor and raises its OSError."""
        self._wait()
        self.num_bytes += tensor.nbytes
        self._last = self._thread.submit(self._write, name, tensor.detach().cpu().contiguous())

    def close(self) -> None:
        """Wait until all tensors are written, and close the file. Raises OSError."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            if self._open is not None:
                self._open.file.close()

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _write(self, name: str, tensor: Tensor) -> None:
        if self._open is None:
            path, headers = self._next.popleft()
            self._open = _File(path, headers)
        self._open.write(name, tensor)
        if not self._open.missing:
            self._open.file.close()
            self._open = None


class _File:
    """A safetensors file (format: huggingface.co/docs/safetensors) whose tensors may be written in any order."""

    def __init__(self, path: Path, headers: Sequence[TensorSpec]) -> None:
        self.missing = {header.name: header for header in headers}
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        # The largest items first, so that each tensor starts at a multiple of its item size.
        for header in sorted(headers, key=lambda header: -header.dtype.itemsize):
            self._starts[header.name], end = end, end + header.num_bytes
            entries[header.name] = {
                "dtype": _NAMES[header.dtype],
                "shape": header.shape,
                "data_offsets": [self._starts[header.name], end],
            }
        text = json.dumps(entries).encode()
        # The format aligns the data to 8 bytes.
        text += b" " * (-len(text) % 8)
        self._data_start = 8 + len(text)
        self.file: BufferedWriter = open(path, "wb")  # noqa: SIM115  (closed by its writer)
        self.file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        header = self.missing.pop(name)
        if (tuple(tensor.shape), tensor.dtype) != (header.shape, header.dtype):
            raise ValueError(
                f"{name} was planned as {header.dtype} {header.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        self.file.seek(self._data_start + self._starts[name])
        self.file.write(tensor.view(-1).view(torch.uint8).numpy().data)


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
