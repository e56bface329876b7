"""Transfers weights through safetensors files in a folder that trainer and servers share.

For clusters on which trainer and servers cannot create a process group.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.families.parameters import TensorSpec
from megatron_rl.weights.bucket_plan import Coverage, place
from megatron_rl.weights.buckets import BucketStream, NamedTensors
from megatron_rl.weights.server_calls import ServerCalls
from megatron_rl.weights.transfer import PublishTransfer, UpdateRequest

_INDEX_NAME = "model.safetensors.index.json"
_VERSION_PREFIX = "weights-"
_PATH = "/update_weights_from_disk"


class DiskSender:
    """The driver's part of one publish; the folder keeps the newest version that all servers have loaded."""

    def __init__(self, named_tensors: NamedTensors, folder: Path, shard_bytes: int) -> None:
        self._stream = BucketStream(named_tensors, shard_bytes, torch.device("cpu"))
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._written: Path | None = None

    def send(self, transfer: PublishTransfer, coverage: Coverage) -> None:
        """Write the weights and make the servers load them; errors as of ``requests`` and ``PublishTransfer.send_all``."""
        transfer.send_all(self.requests(transfer.calls, transfer.version, coverage))

    def requests(self, calls: ServerCalls, version: int, coverage: Coverage) -> Iterator[UpdateRequest]:
        """Yield one request, after the whole stream is written. Raises CoverageError for a stream with wrong tensors."""
        folder = write_version(self._stream.tensors, self._folder, version, self._shard_bytes, coverage)
        body = _loading(folder, version)
        num_bytes = _num_bytes(folder)
        # The request also flushes the cache, which a server refuses while it is still cleaning up its last request.
        calls.wait_until_idle("it loads new weights")
        self._written = folder
        bodies = (body,) * len(calls.servers)
        yield UpdateRequest(_PATH, bodies, num_bytes, lambda calls: [], needs_session=False)

    @property
    def peak_buffer_bytes(self) -> int:
        return 0

    def finish(self, *, failed: bool) -> str:
        """Remove older versions, unless servers may still need them, and exhaust the stream."""
        if self._written is not None and not failed:
            remove_other_versions(self._folder, keep=self._written)
        return self._stream.finish()


def load_folder(calls: ServerCalls, folder: Path, version: int) -> int:
    """Make all servers load the safetensors of a Hugging Face folder; returns their size in bytes. Raises ServerCallError."""
    calls.wait_until_idle("it loads new weights")
    calls.post(_PATH, _loading(folder, version))
    return _num_bytes(folder)


def _loading(folder: Path, version: int) -> dict[str, Any]:
    return {
        "model_path": str(folder.absolute()),
        "load_format": "auto",  # otherwise a server started with dummy weights would load dummy weights again
        "weight_version": str(version),
        "flush_cache": True,
    }


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def write_version(
    named_tensors: NamedTensors,
    folder: Path,
    version: int,
    shard_bytes: int,
    coverage: Coverage,
) -> Path:
    """Write the stream as ``folder/weights-<version>`` in shards of about ``shard_bytes``; returns that folder.

    The folder gets its name only when it is complete. Raises CoverageError, after removing the incomplete folder.
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
    """Delete the folders of earlier ``write_version`` calls in ``folder``."""
    for path in folder.glob(f"{_VERSION_PREFIX}*"):
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)


def _write_shards(
    named_tensors: NamedTensors, folder: Path, shard_bytes: int, coverage: Coverage
) -> None:
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    placed: tuple[int, int] | None = None

    def write_shard(index: int) -> None:
        file_name = f"model-{index:05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
        shard.clear()

    for name, tensor in named_tensors:
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        coverage.add(spec)
        coverage.check(complete=False)
        previous, placed = placed, place(spec, placed, shard_bytes)
        if previous is not None and placed[0] != previous[0]:
            write_shard(previous[0])
        # A copy, because safetensors refuses tensors that share memory, such as slices of one fused weight.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
    coverage.check(complete=True)
    if placed is not None:
        write_shard(placed[0])
    (folder / _INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
