"""A model's safetensors files, planned before anything is written: which rank writes which tensor, in which file and where.

So ranks write at the same time without a word between them, and none holds more than two tensors in host memory.
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
"""As safetensors calls the dtypes of weights."""


def least_loaded(loads: Sequence[int], ranks: Sequence[int], least_bytes: int) -> int:
    """Which of ``ranks`` writes next; ``loads``: bytes by rank so far. A rank that has begun gets ``least_bytes`` first."""
    return min(ranks, key=lambda rank: (loads[rank] // least_bytes, rank))


def cut(tensors: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Tensors in their order as files of at most ``max_shard_bytes``; a larger one is a file of its own."""
    files: list[list[TensorSpec]] = []
    room = 0
    for header in tensors:
        if not files or header.num_bytes > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(header)
        room -= header.num_bytes
    return files


def part_path(folder: Path, rank: int, index: int) -> Path:
    """Where a rank writes its file ``index``, until all are there and get their names."""
    return folder / f"rank-{rank}-{index}.safetensors"


class RankWriter:
    """One rank's files. Tensors come in the order of the plan and are written by a thread while the next one is gathered."""

    def __init__(self, folder: Path, rank: int, files: Sequence[Sequence[TensorSpec]]) -> None:
        self._next = deque((part_path(folder, rank, index), file) for index, file in enumerate(files))
        self._open: _File | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save-hf")
        self._last: Future[None] | None = None
        self.total_bytes = sum(header.num_bytes for file in files for header in file)
        self.num_bytes = 0
        """Given so far."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises OSError, of this tensor or of the one before."""
        self._wait()
        self.num_bytes += tensor.nbytes
        self._last = self._thread.submit(self._write, name, tensor.detach().cpu().contiguous())

    def close(self) -> None:
        """Wait until all is written. Raises OSError."""
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
    """A safetensors file (its format: huggingface.co/docs/safetensors) whose tensors may come in any order."""

    def __init__(self, path: Path, headers: Sequence[TensorSpec]) -> None:
        self.missing = {header.name: header for header in headers}
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        # The largest items first, so that each tensor begins at a multiple of its item.
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
                f"{name} was planned as {header.dtype} {header.shape} and came as {tensor.dtype} {tuple(tensor.shape)}"
            )
        self.file.seek(self._data_start + self._starts[name])
        self.file.write(tensor.view(-1).view(torch.uint8).numpy().data)
