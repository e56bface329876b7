"""Writes and reads Megatron's distributed checkpoints (torch_dist) one parameter at a time, in one process.

A checkpoint's ``.metadata`` is a pickle. It is loaded only after ``check_metadata`` has verified that the pickle
imports nothing but the classes of metadata.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PretrainedConfig

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.families.parameters import Entry, Role, canonical_name, entries
from megatron_rl.models import critic, policy
from megatron_rl.models.hf.tensor_sources import WeightsError
from megatron_rl.system.files.probes import UnsafePickle, check_pickle
from megatron_rl.system.megatron_core import write_common

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES = {
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "collections.OrderedDict",
    # The writer's folder, stored by torch and by ``convert``; Python 3.13 moved the class to another module.
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    *(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype | torch.memory_format)),
    *(
        f"{_METADATA_MODULE}.{name}"
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        f"torch.distributed.checkpoint.planner.{name}"
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    ),
}  # fmt: skip
"""Names that metadata of tensors and plain objects may import, in the releases of torch since 2.0."""
_METADATA_ENUMS = {f"{_METADATA_MODULE}._MEM_FORMAT_ENCODING", "torch.distributed.checkpoint.planner.WriteItemType"}


def check_metadata(folder: Path) -> None:
    """Raise UnsafePickle unless ``.metadata`` is a pickle of a checkpoint's metadata and nothing else."""
    check_pickle(folder / ".metadata", _METADATA_NAMES, _METADATA_ENUMS)


@dataclass(frozen=True)
class Parameter:
    """A Megatron parameter: its Hugging Face tensors, and its pieces (sharded tensors) in the checkpoint."""

    entry: Entry
    sharded: ShardedBase
    """A ShardedTensor, or the factory of several; without data."""

    def pieces(self, value: Tensor | None = None) -> list[ShardedTensor]:
        """The parameter's pieces in the checkpoint, with the data of ``value`` if given."""
        sharded = self.sharded
        if value is not None:
            sharded = replace(sharded, data=value, **({} if _is_factory(sharded) else {"dtype": value.dtype}))
        return [sharded] if not _is_factory(sharded) else list(nested_values({"": sharded.build()}))

    def merge(self, parts: list[Tensor]) -> Tensor:
        """The parameter assembled from the data of its pieces."""
        return self.sharded.merge_fn(parts) if _is_factory(self.sharded) else parts[0]


Contents = tuple[list[Parameter], list[ShardedObject]]
"""All parameters of a checkpoint in the order of Hugging Face files, and the extra states of layers.

The extra states are empty in this model, but Megatron's loader requires them."""


def contents_of(config: PretrainedConfig, role: Role) -> Contents:
    """The contents of the model's checkpoint, read from a model on the meta device."""
    build = policy.build_policy if role == "policy" else critic.build_critic
    with torch.device("meta"):
        (chunk,) = build(config, ParallelConfig(), dtype=torch.float32, seed=None)
        state = chunk.sharded_state_dict(metadata={"singleton_local_shards": False})
    objects = [value for value in state.values() if isinstance(value, ShardedObject)]
    sharded = {canonical_name(name): value for name, value in state.items() if not isinstance(value, ShardedObject)}
    parameters = [Parameter(entry, sharded.pop(entry.megatron)) for entry in entries(config, role)]
    if sharded:
        raise WeightsError(f"Megatron's parameter {next(iter(sharded))} has no rule for model_type {config.model_type}")
    return parameters, objects


def _is_factory(sharded: ShardedBase) -> bool:
    return isinstance(sharded, ShardedTensorFactory)


def write_checkpoint(
    contents: Contents,
    load: Callable[[Entry], Tensor],
    folder: Path,
    *,
    dtypes: Mapping[str, torch.dtype],
    target: Path,
) -> None:
    """Write Megatron's files into ``folder``. Raises OSError, with ``target`` as the folder's name.

    ``load`` returns an entry's parameter and is called when the parameter is written. ``dtypes`` maps the names of
    Hugging Face tensors to dtypes.
    """
    planner = _StreamingPlanner(contents, dtypes, load)
    try:
        save({}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
        write_common({"content_metadata": {"singleton_local_shards": False}}, folder)
        save_config(CheckpointingConfig("torch_dist"), str(folder))
    except (CheckpointException, OSError, RuntimeError) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            # The exception has one failure per rank, and there is one rank.
            ((cause, _),) = error.failures.values()
        # torch.save reports a full disk as a RuntimeError of its zip writer (inline_container) about missing bytes.
        if isinstance(cause, OSError) or "inline_container" in str(cause):
            reason = str(cause).splitlines()[0]
            raise OSError(f"{target} could not be written, is there space left? {reason}") from error
        raise cause from error


class _StreamingPlanner(SavePlanner):
    """Plans all pieces by their shapes, and loads the data of a parameter when its first piece is written."""

    def __init__(self, contents: Contents, dtypes: Mapping[str, torch.dtype], load: Callable[[Entry], Tensor]) -> None:
        self._load = load
        parameters, objects = contents
        self._objects = {MetadataIndex(item.unique_key): item for item in objects}
        self._items = [WriteItem(index, WriteItemType.BYTE_IO) for index in self._objects]
        self._piece_of: dict[MetadataIndex, tuple[Parameter, int]] = {}
        self._loaded: tuple[Parameter | None, list[ShardedTensor]] = (None, [])
        dtype_of_key: dict[str, tuple[torch.dtype, str]] = {}
        for parameter in parameters:
            for name in parameter.entry.hf:
                for piece in parameter.pieces():
                    dtype, first = dtype_of_key.setdefault(piece.key, (dtypes[name], name))
                    if dtypes[name] != dtype:
                        raise WeightsError(
                            f"{name} is {dtypes[name]} but {first} is {dtype}: Megatron keeps both in one tensor, "
                            f"{piece.key}; convert them to one dtype"
                        )
            for index, piece in enumerate(parameter.pieces()):
                item = _write_item(piece, dtype_of_key[piece.key][0])
                self._items.append(item)
                self._piece_of[item.index] = (parameter, index)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([self._objects[write_item.index].data], stream)
            return stream
        parameter, index = self._piece_of[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        if self._loaded[0] is not parameter:
            # Freed first, so that only one parameter is in memory at a time.
            self._loaded = (None, [])
            self._loaded = (parameter, parameter.pieces(self._load(parameter.entry)))
        piece = self._loaded[1][index]
        return piece.data.reshape(_sizes(piece))


def _write_item(piece: ShardedTensor, dtype: torch.dtype) -> WriteItem:
    offsets, sizes = torch.Size(piece.global_offset), _sizes(piece)
    return WriteItem(
        index=MetadataIndex(piece.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(piece.global_shape),
        ),
    )


def _sizes(piece: ShardedTensor) -> torch.Size:
    """The piece's shape in the global tensor, which may stack layers or experts along additional axes."""
    return torch.Size((1,) * piece.prepend_axis_num + tuple(piece.local_shape))


class MegatronCheckpoint:
    """A distributed checkpoint of any parallel layout, read piece by piece.

    Raises:
        FileNotFoundError: the folder is not a distributed checkpoint.
        WeightsError: the checkpoint is broken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = maybe_load_config(str(folder))
        if config is None:
            raise FileNotFoundError(
                f"{folder} is not a distributed checkpoint of Megatron: it has no metadata.json; convert a Hugging Face folder "
                "with --to megatron"
            )
        if config.sharded_backend != "torch_dist":
            raise WeightsError(f"{folder} is in the format {config.sharded_backend!r}; only torch_dist is read")
        self._reader = FileSystemReader(folder)
        try:
            check_metadata(folder)
            metadata = self._reader.read_metadata()
        except UnsafePickle as error:
            raise WeightsError(f"{error}; fetch it again, from a source you trust") from error
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError, TypeError) as error:
            raise WeightsError(f"{folder / '.metadata'} cannot be read: {error!r}; fetch it again") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: tensor
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }

    def holds_value_head(self) -> bool:
        head = self.tensors.get("output_layer.weight")
        return head is not None and head.size[0] == 1

    def check(self, piece: ShardedTensor, entry: Entry) -> None:
        """Raise WeightsError if the tensor is missing or of the wrong shape; a vocabulary may be padded at its end."""
        if piece.key not in self.tensors:
            raise WeightsError(f"{self.folder} has no tensor {piece.key}, from which {next(iter(entry.hf))} is made")
        actual, expected = tuple(self.tensors[piece.key].size), tuple(piece.global_shape)
        may_be_longer = piece.allow_shape_mismatch and len(actual) == len(expected)
        if actual != expected and not (may_be_longer and actual[0] >= expected[0] and actual[1:] == expected[1:]):
            raise WeightsError(
                f"{self.folder}: {piece.key} has shape {actual}, config.json requires {expected}; does the checkpoint belong "
                "to another model?"
            )

    def merged(self, parameter: Parameter) -> Tensor:
        """The full parameter, read from its pieces. Raises WeightsError."""
        return parameter.merge([self.read(piece) for piece in parameter.pieces()])

    def read(self, piece: ShardedTensor) -> Tensor:
        tensor, sizes = self.tensors[piece.key], _sizes(piece)
        target = torch.empty(sizes, dtype=tensor.properties.dtype)
        chunk = ChunkStorageMetadata(offsets=torch.Size(piece.global_offset), sizes=sizes)
        items = create_read_items_for_chunk_list(piece.key, tensor, [chunk])
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise WeightsError(f"{self.folder}: parts of {piece.key} are missing from all files")
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        except (OSError, EOFError, RuntimeError, ValueError, AssertionError, pickle.UnpicklingError) as error:
            files = sorted({self._reader.storage_data[item.storage_index].relative_path for item in items})
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            raise WeightsError(
                f"{self.folder / files[0]}: {piece.key} cannot be read: {reason}; fetch the file again"
            ) from error
        return target.reshape(piece.local_shape)


class _Into(DefaultLoadPlanner):
    """Load plan that copies the read chunks into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = tuple(slice(o, o + n) for o, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self.target[index]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
