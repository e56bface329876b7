"""Where weights come from: a folder of safetensors, or a random generator that knows tensors by their names."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.families.transforms import Sliceable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_FLOATING = ("F64", "F32", "F16", "BF16")
"""Data types of weights, as safetensors names them; others are quantised, or no weights."""
_MAX_MAPPED_ELEMENTS = 64 * 1024**2
"""Files are mapped into memory, and what has been read stays there until they are closed: they are, after so much."""


class WeightsError(UserError, ValueError):
    """A checkpoint does not hold what the model needs."""


class TensorSource(Protocol):
    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Sliceable:
        """The full Hugging Face tensor ``name`` of ``shape``, or its ``part`` [shape[1:]], to be sliced."""
        ...


class _Part:
    """Part ``index`` of a tensor that is read by slices; transposed where the file has it so."""

    def __init__(self, tensor: Any, index: int, *, is_transposed: bool) -> None:
        self.tensor, self.index, self.is_transposed = tensor, index, is_transposed

    def get_shape(self) -> list[int]:
        shape = list(self.tensor.get_shape())[1:]
        return shape[::-1] if self.is_transposed else shape

    def __getitem__(self, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if not self.is_transposed:
            return self.tensor[(self.index, *index)]
        rows, columns = (*index, slice(None))[:2]
        return self.tensor[(self.index, columns, rows)].T


class RandomSource:
    """Fresh weights: normal with ``std``, norms 1, biases 0.

    A tensor depends on ``seed`` and its name alone, so that every layout of ranks starts from the same model.
    """

    def __init__(self, seed: int, std: float) -> None:
        self.seed, self.std = seed, std

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Tensor:
        if part is not None:
            name, shape = f"{name}/{part}", shape[1:]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.empty(shape).normal_(0.0, self.std, generator=generator)


class CheckpointSource:
    """A Hugging Face folder of safetensors, one file or several with an index; files are read slice by slice.

    ``stacked``: tensors that hold all experts of a layer, by name, with their shapes as on the hub. transformers 5 saves
    each expert in them transposed; which way it is here is learnt once, from all of them, for one alone may be square.
    ``files`` says which file holds a tensor: all tensors of all files that the index names, whether it names them or
    not. Errors: FileNotFoundError without any safetensors, ``WeightsError`` for a broken or missing file, an index that
    files contradict, a tensor that is missing or there twice, of another shape, or quantised.
    """

    def __init__(self, folder: str | Path, stacked: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.folder = Path(folder)
        self._open_files: dict[str, safe_open] = {}
        self._num_mapped_elements = 0
        has_index, has_single = (self.folder / INDEX_FILE).is_file(), (self.folder / SINGLE_FILE).is_file()
        if has_index and has_single:
            raise WeightsError(
                f"{self.folder} holds both {SINGLE_FILE} and {INDEX_FILE}, which readers choose between differently; "
                "remove the one that is not the model"
            )
        if has_index:
            self.files = self._from_index(self.folder / INDEX_FILE)
        elif has_single:
            self.files = dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            pickles = any(self.folder.glob("*.bin"))
            remedy = "save it with safetensors: pickled weights (*.bin) are not read" if pickles else ""
            raise FileNotFoundError(
                f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; "
                + (remedy or "for fresh weights set policy.init=random")
            )
        self.are_experts_transposed = self._transposed(stacked or {})

    def _transposed(self, stacked: Mapping[str, tuple[int, ...]]) -> bool:
        ways: dict[bool, str] = {}
        for name, shape in stacked.items():
            if name in self.files and shape[1] != shape[2]:
                found = tuple(self._file(self.files[name]).get_slice(name).get_shape())
                if found in (shape, _with_transposed_parts(shape)):
                    ways[found != shape] = name
        if len(ways) == 2:
            raise WeightsError(
                f"{self.folder}: each expert of {ways[True]} is stored as transformers saves it, of {ways[False]} as on the hub "
                "(transposed); bring all files from one place"
            )
        return True in ways

    def _from_index(self, index: Path) -> dict[str, str]:
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WeightsError(f"{index} is not an index with a weight_map: {error!r}") from error
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise WeightsError(f"{index}: weight_map is not an object of tensor names and file names")
        files: dict[str, str] = {}
        for file in sorted(set(listed.values())):
            # The name of "a/.." is "..", which is a folder.
            if Path(file).name != file or file in ("", ".", "..") or "\0" in file:
                raise WeightsError(f"{index}: {file!r} is not the name of a file in its folder")
            for name in self._file(file).keys():  # noqa: SIM118  (a safetensors file is no mapping)
                if name in files:
                    raise WeightsError(
                        f"{self.folder}: {name} is in {files[name]} and in {file}; only one of them can be the model's: "
                        "remove the file that is not, or fetch both again"
                    )
                files[name] = file
        for name, file in listed.items():
            if files.get(name) != file:
                raise WeightsError(
                    f"{self.folder / file} holds no tensor {name}, but {INDEX_FILE} says so"
                    + (f"; it is in {files[name]}" if name in files else "")
                    + "; fetch index and files again"
                )
        return files

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def is_empty(self, name: str) -> bool:
        """Whether the tensor has no elements."""
        return 0 in self._file(self.files[name]).get_slice(name).get_shape()

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Sliceable:
        if name not in self.files:
            raise WeightsError(f"{self.folder} holds no tensor {name}, which its config.json asks for")
        file = self.files[name]
        try:
            tensor = self._file(file).get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{self.folder / file} holds no readable tensor {name}: {error}") from error
        if tensor.get_dtype() not in _FLOATING:
            raise WeightsError(
                f"{self.folder / file}: {name} is {tensor.get_dtype()}: quantised weights are not read; give a copy in "
                "bfloat16 or float32"
            )
        is_transposed = part is not None and self.are_experts_transposed
        expected = _with_transposed_parts(shape) if is_transposed else shape
        if tuple(tensor.get_shape()) != expected:
            raise WeightsError(
                f"{self.folder / file}: {name} has shape {tuple(tensor.get_shape())}, config.json asks for {expected}; "
                "check its vocab_size, hidden_size and head counts against the checkpoint"
            )
        self._num_mapped_elements += math.prod(shape if part is None else shape[1:])
        if self._num_mapped_elements > _MAX_MAPPED_ELEMENTS:
            # A slice that is still in use keeps its own file open.
            self._open_files.clear()
            self._num_mapped_elements = 0
        return tensor if part is None else _Part(tensor, part, is_transposed=is_transposed)

    def read_whole(self, name: str) -> Tensor:
        """The tensor ``name`` whatever its shape; for tensors that no table describes."""
        try:
            return self._file(self.files[name]).get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{self.folder / self.files[name]} holds no readable tensor {name}: {error}") from error

    def _file(self, name: str) -> safe_open:
        if name not in self._open_files:
            path = self.folder / name
            try:
                self._open_files[name] = safe_open(path, "pt")
            except FileNotFoundError as error:
                raise WeightsError(f"{path} is missing, but {INDEX_FILE} names it") from error
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is not a whole safetensors file: {error}; fetch it again") from error
        return self._open_files[name]


def _with_transposed_parts(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[:0:-1])
