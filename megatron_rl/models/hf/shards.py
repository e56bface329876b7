"""Writes a model's safetensors files by a plan that assigns every tensor to a rank, a file and an offset beforehand.

Because of the plan, ranks write in parallel without communication. Each rank has at most two tensors in host memory.
"""

import json
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedWriter
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.families.parameters import TensorSpec

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
