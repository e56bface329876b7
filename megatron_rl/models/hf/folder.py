"""Writes Hugging Face model folders: safetensors, config.json, tokenizer."""

import json
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.families.family import families
from megatron_rl.families.parameters import TensorSpec
from megatron_rl.models.hf.tensor_sources import INDEX_FILE, SINGLE_FILE

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
        config.pop("torch_dtype", None)
        count = families()[config["model_type"]].num_mtp_layers
        if config.get(count) and not self.keeps_mtp:
            config[count] = 0
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))
