"""Weights as safetensors: the fallback way to the servers, and the shapes that a checkpoint's headers declare."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.weights.plan import Coverage, Placement, TensorSpec, place

_INDEX_NAME = "model.safetensors.index.json"
_VERSION_PREFIX = "weights-"


def read_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in a folder's safetensors; reads headers only. Raises FileNotFoundError."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}: expected a Hugging Face checkpoint folder")
    shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def count_bytes(folder: Path) -> int:
    """Bytes of the safetensors in ``folder``; raises FileNotFoundError where there are none."""
    files = list(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}: expected a Hugging Face checkpoint folder")
    return sum(file.stat().st_size for file in files)


def write_version(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    version: int,
    shard_bytes: int,
    coverage: Coverage,
) -> Path:
    """Write the stream as ``folder/weights-<version>`` in shards of about ``shard_bytes``; returns that folder.

    The folder appears under its name only when it is complete. Raises CoverageError and then leaves nothing behind.
    """
    final = folder / f"{_VERSION_PREFIX}{version}"
    partial = folder / f".{_VERSION_PREFIX}{version}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_shards(named_tensors, partial, shard_bytes, coverage)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def remove_other_versions(folder: Path, keep: Path) -> None:
    """Delete what earlier calls of ``write_version`` left in ``folder``."""
    for path in folder.glob(f"{_VERSION_PREFIX}*"):
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)


def _write_shards(
    named_tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int, coverage: Coverage
) -> None:
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    placement: Placement | None = None

    def write_shard(index: int) -> None:
        file_name = f"model-{index:05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
        shard.clear()

    for name, tensor in named_tensors:
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        coverage.add(spec)
        coverage.check(complete=False)
        previous, placement = placement, place(spec, placement, shard_bytes)
        if previous is not None and placement.bucket != previous.bucket:
            write_shard(previous.bucket)
        # A copy: safetensors refuses tensors that share memory, as slices of one fused weight do.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
    coverage.check(complete=True)
    write_shard(placement.bucket)
    (folder / _INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
