"""Sources of weights: a folder of safetensors, or a random generator seeded by tensor names.

Multi-token-prediction layers are never built and never trained. If kept, their
tensors are copied unchanged from the source folder into every saved folder, and config.json keeps their number. If
dropped, config.json's number is 0. After training, kept layers are still the layers of the initial model.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.errors import UserError
from megatron_rl.families.family import family_of
from megatron_rl.families.model_facts import num_mtp_layers, text_config
from megatron_rl.families.transforms import Sliceable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_SHOWN = 200
"""Characters of a name that an error quotes; an index may contain any text."""
_FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, as safetensors names them; tensors of other dtypes are quantized or not weights."""
_BLOCKS, _SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors that store a matrix in MXFP4."""
_BLOCK_BYTES = 16
"""Bytes of the 32 numbers in MXFP4 that share a scale."""
_FP4 = torch.tensor([sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
_MAX_MAPPED_ELEMENTS = 64 * 1024**2
"""Elements read before files are closed: files are mapped, and read pages stay in memory while a file is open."""


class WeightsError(UserError, ValueError):
    """A checkpoint whose tensors do not fit the model."""


class _Part:
    """Slice ``index`` along the first dimension of a tensor that is read in slices, transposed if the file is."""

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


class _Mxfp4:
    """A stacked matrix [experts, in, out] in MXFP4, read in slices as bfloat16 (OCP Microscaling Formats 1.0).

    ``blocks`` [experts, out, in / 32, 16] uint8: two numbers per byte, the lower four bits first; ``scales`` [experts, out, in / 32]
    uint8: exponents of 2, plus 127, of the factor that 32 numbers share.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self.blocks, self.scales = blocks, scales

    def get_shape(self) -> list[int]:
        experts, rows, num_blocks, num_bytes = self.blocks.get_shape()
        return [experts, 2 * num_blocks * num_bytes, rows]

    def __getitem__(self, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        expert, columns, rows = (*index, slice(None), slice(None))[:3]
        blocks, exponents = self.blocks[expert, rows], self.scales[expert, rows].int() - 127
        numbers = _FP4[torch.stack([blocks & 15, blocks >> 4], dim=-1).int()].flatten(-2)
        return torch.ldexp(numbers, exponents[..., None]).bfloat16().flatten(-2).mT[..., columns, :]


class RandomSource:
    """Fresh weights: normal with ``std``, norms 1, biases and sinks 0.

    A tensor depends on ``seed`` and its name alone, so that every parallel layout starts from the same model.
    """

    def __init__(self, seed: int, std: float, fresh: Mapping[str, float] | None = None) -> None:
        """``fresh``: values of other vectors, by the end of their names (``Family.fresh``)."""
        self.seed, self.std, self.fresh = seed, std, fresh or {}

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Tensor:
        """Generate the tensor ``name`` of ``shape``; with ``part``, only its slice [shape[1:]] at this index of the first dimension."""
        is_zero = name.endswith(("bias", "sinks"))
        if part is not None:
            name, shape = f"{name}/{part}", shape[1:]
        if len(shape) == 1:
            default = 0.0 if is_zero else 1.0
            return torch.full(shape, next((value for end, value in self.fresh.items() if name.endswith(end)), default))
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.empty(shape).normal_(0.0, self.std, generator=generator)


class CheckpointSource:
    """A Hugging Face folder of safetensors, one file or several with an index; files are read in slices.

    ``stacked`` maps tensors with all experts of a layer to their shapes on the hub. transformers 5 saves each
    expert in them transposed; the layout of this folder is detected once, from all of them, because a single one
    may be square. ``files`` maps every tensor of all files in the index to its file, including tensors that the
    index omits; a matrix in MXFP4, stored as two tensors, has its own name and the file of its blocks.

    Raises:
        FileNotFoundError: no safetensors.
        WeightsError: a broken or missing file, an index that contradicts the files, or a tensor that is missing,
            duplicate, quantized or of the wrong shape.
    """

    def __init__(self, folder: str | Path, stacked: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.folder = Path(folder)
        self._open_files: dict[str, safe_open] = {}
        self._num_mapped_elements = 0
        has_index, has_single = (self.folder / INDEX_FILE).is_file(), (self.folder / SINGLE_FILE).is_file()
        if has_index and has_single:
            raise WeightsError(
                f"{self.folder} has both {SINGLE_FILE} and {INDEX_FILE}, and readers differ in which one they load; "
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
                f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
                + (remedy or "for fresh weights set policy.init=random")
            )
        self._scale_files = {name: self.files.pop(name + _SCALES) for name in self._mxfp4_names()}
        self.files |= {name: self.files.pop(name + _BLOCKS) for name in self._scale_files}
        self.are_experts_transposed = self._transposed(stacked or {})

    def _mxfp4_names(self) -> list[str]:
        names = [name.removesuffix(_BLOCKS) for name in self.files if name.endswith(_BLOCKS)]
        return [name for name in names if name not in self.files and name + _SCALES in self.files]

    def _slice(self, name: str) -> Any:
        """The tensor ``name``, to be read in slices. Raises SafetensorError."""
        if name not in self._scale_files:
            return self._file(self.files[name]).get_slice(name)
        blocks = self._file(self.files[name]).get_slice(name + _BLOCKS)
        scales = self._file(self._scale_files[name]).get_slice(name + _SCALES)
        dtypes, shapes = (blocks.get_dtype(), scales.get_dtype()), (blocks.get_shape(), scales.get_shape())
        if dtypes != ("U8", "U8") or len(shapes[1]) != 3 or shapes[0] != [*shapes[1], _BLOCK_BYTES]:
            raise WeightsError(
                f"{self.folder / self.files[name]}: {name}{_BLOCKS} {dtypes[0]} {shapes[0]} and {name}{_SCALES} {dtypes[1]} {shapes[1]} "
                f"are no MXFP4, expected U8 [experts, rows, blocks, {_BLOCK_BYTES}] and U8 [experts, rows, blocks]; fetch them again"
            )
        return _Mxfp4(blocks, scales)

    def _transposed(self, stacked: Mapping[str, tuple[int, ...]]) -> bool:
        examples: dict[bool, str] = {}
        for name, shape in stacked.items():
            if name in self.files and shape[1] != shape[2]:
                actual = tuple(self._slice(name).get_shape())
                if actual in (shape, _with_transposed_parts(shape)):
                    examples[actual != shape] = name
        if len(examples) == 2:
            raise WeightsError(
                f"{self.folder}: each expert of {examples[True]} is stored as transformers saves it, of {examples[False]} as on "
                "the hub (transposed); take all files from one source"
            )
        return True in examples

    def _from_index(self, index: Path) -> dict[str, str]:
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WeightsError(f"{index} is not an index with a weight_map: {error!r}") from error
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise WeightsError(f"{index}: weight_map is not an object of tensor names and file names")
        files: dict[str, str] = {}
        for file in sorted(set(listed.values())):
            # The last condition: Path("a/..").name is "..", which is a folder.
            if Path(file).name != file or file in ("", ".", "..") or "\0" in file:
                raise WeightsError(f"{index}: {file[:_MAX_SHOWN]!r} is not the name of a file in its folder")
            for name in self._file(file).keys():  # noqa: SIM118  (a safetensors file is not a mapping)
                if name in files:
                    raise WeightsError(
                        f"{self.folder}: {name} is in {files[name]} and in {file}; only one of them can be the model's: "
                        "remove the file that is not, or fetch both again"
                    )
                files[name] = file
        for name, file in listed.items():
            if files.get(name) != file:
                raise WeightsError(
                    f"{self.folder / file} has no tensor {name[:_MAX_SHOWN]}, although {INDEX_FILE} lists it there"
                    + (f"; it is in {files[name]}" if name in files else "")
                    + "; fetch index and files again"
                )
        return files

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def is_empty(self, name: str) -> bool:
        """Return whether the tensor has no elements."""
        return 0 in self._slice(name).get_shape()

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Sliceable:
        """Open the tensor ``name`` of ``shape``, or its slice [shape[1:]] at index ``part``, to be read in slices."""
        if name not in self.files:
            raise WeightsError(f"{self.folder} has no tensor {name}, which config.json requires")
        file = self.files[name]
        try:
            tensor = self._slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{self.folder / file} has no readable tensor {name}: {error}") from error
        if not isinstance(tensor, _Mxfp4) and tensor.get_dtype() not in _FLOATING:
            raise WeightsError(
                f"{self.folder / file}: {name} is {tensor.get_dtype()}: quantized weights are not supported; use a copy in "
                "bfloat16 or float32"
            )
        is_transposed = part is not None and len(shape) == 3 and self.are_experts_transposed
        expected = _with_transposed_parts(shape) if is_transposed else shape
        if tuple(tensor.get_shape()) != expected:
            raise WeightsError(
                f"{self.folder / file}: {name} has shape {tuple(tensor.get_shape())}, config.json requires {expected}; "
                "check its vocab_size, hidden_size and head counts against the checkpoint"
            )
        self._num_mapped_elements += math.prod(shape if part is None else shape[1:])
        if self._num_mapped_elements > _MAX_MAPPED_ELEMENTS:
            # Safe while slices are in use, because a slice keeps its own file open.
            self._open_files.clear()
            self._num_mapped_elements = 0
        return tensor if part is None else _Part(tensor, part, is_transposed=is_transposed)

    def read_whole(self, name: str) -> Tensor:
        """The tensor ``name`` with any shape; for tensors that no table describes."""
        try:
            return self._file(self.files[name]).get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{self.folder / self.files[name]} has no readable tensor {name}: {error}") from error

    def _file(self, name: str) -> safe_open:
        if name not in self._open_files:
            path = self.folder / name
            try:
                self._open_files[name] = safe_open(path, "pt")
            except FileNotFoundError as error:
                raise WeightsError(f"{self.folder}: {name[:_MAX_SHOWN]} is missing, but {INDEX_FILE} lists it") from error
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is not a complete safetensors file: {error}; fetch it again") from error
        return self._open_files[name]


class TensorSource(Protocol):
    """A source of full tensors, which may be read in slices."""

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Sliceable:
        """The tensor ``name`` of ``shape``, or its slice [shape[1:]] at index ``part``."""
        ...


def _with_transposed_parts(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[:0:-1])


def is_mtp(config: PretrainedConfig, name: str) -> bool:
    """Return whether tensor ``name`` belongs to a multi-token-prediction layer.

    Files number these layers after the decoder's layers, and config.json has their number (``Family.num_mtp_layers``),
    or their names have a prefix of their own (``Family.mtp_prefix``).
    """
    prefix = family_of(config).mtp_prefix
    if prefix:
        return name.startswith(prefix)
    match = re.match(r"model\.layers\.(\d+)\.", name)
    first, count = text_config(config).num_hidden_layers, num_mtp_layers(config)
    return match is not None and first <= int(match[1]) < first + count


def mtp_names(config: PretrainedConfig, source: CheckpointSource) -> list[str]:
    """Names of the multi-token-prediction tensors of ``source``, in the order of the files."""
    return [name for name in source.files if is_mtp(config, name)]


def mtp_tensors(config: PretrainedConfig, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every multi-token-prediction tensor in ``folder``, with one tensor in memory at a time."""
    source = CheckpointSource(folder)
    for name in mtp_names(config, source):
        yield name, source.read_whole(name)


def check_mtp_present(config: PretrainedConfig, folder: str | Path, *, remedy: str) -> None:
    """Raise WeightsError if ``folder`` has no multi-token-prediction tensors to keep."""
    if not mtp_names(config, CheckpointSource(folder)):
        raise WeightsError(
            f"{folder} has no tensors of multi-token-prediction layers (config.json: {family_of(config).num_mtp_layers} "
            f"{num_mtp_layers(config)}), so there is nothing to keep; {remedy}"
        )


def mtp_note(config: PretrainedConfig, folder: str | Path, *, keeps: bool) -> str:
    """Note on the multi-token-prediction layers of a policy that starts from ``folder``; empty if it has none."""
    count = len(mtp_names(config, CheckpointSource(folder)))
    if not count:
        return ""
    fate = "kept unchanged, untrained (policy.mtp=keep)" if keeps else "dropped (policy.mtp=drop)"
    return f"multi-token-prediction layers: {count} tensors of {folder} are {fate}"
