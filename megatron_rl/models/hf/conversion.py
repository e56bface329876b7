"""``megatron-rl convert``: a model between a Hugging Face folder and Megatron's distributed checkpoint (torch_dist).

Invariants: tensors are read, rearranged and written one parameter at a time, so that memory holds a parameter and, on
the way to Hugging Face, the file being filled; the bits and dtypes of every tensor survive a round trip; nothing is
written before every tensor has been found with its shape; the output folder appears once it is complete. One process,
no GPU. A distributed checkpoint does not depend on a parallel layout: any layout loads it.

A distributed checkpoint's ``.metadata`` is a pickle, like all of Megatron's: read only checkpoints that you trust.
"""

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_global_save_plan
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
from transformers import PretrainedConfig

from megatron_rl.config.schema import Mtp, ParallelConfig
from megatron_rl.families.facts import dims, text_config
from megatron_rl.families.parameters import VALUE_HEAD, Entry, Role, canonical_name, entries, stacked_shapes
from megatron_rl.families.transforms import Shard
from megatron_rl.models import critic, policy
from megatron_rl.models.hf.megatron_config import check_layout
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.mtp import is_mtp, mtp_names, mtp_tensors
from megatron_rl.models.hf.sources import INDEX_FILE, SINGLE_FILE, CheckpointSource, WeightsError
from megatron_rl.models.hf.weights import (
    COPIED_FILES,
    IGNORED_TENSORS,
    FolderWriter,
    assemble,
    expected_names,
    read_entry,
)
from megatron_rl.parallel import topology

_WHOLE = Shard(0, 1)
_MTP_FOLDER = "mtp"
"""Inside a distributed checkpoint: layers that go along without being part of Megatron's model."""
_TRANSPOSED_MARK = "experts_as_transformers_saves_them"
"""An empty file inside a distributed checkpoint: its stacked experts go back the way they came (``CheckpointSource``)."""
_NOT_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine_state")
"""What training checkpoints hold beside the model, by the beginnings of its keys."""


@dataclass(frozen=True)
class Conversion:
    num_tensors: int
    """Hugging Face tensors that went over."""
    num_bytes: int
    left_out: list[str]
    """Tensors of the input that the output does not hold."""


def convert(
    input_folder: str | Path,
    output_folder: str | Path,
    *,
    to: str,
    config_folder: str | Path | None = None,
    parallel: ParallelConfig = ParallelConfig(),
    mtp: Mtp | None = None,
    max_shard_bytes: int,
) -> Conversion:
    """Convert ``input_folder`` into ``output_folder``, which must not exist; ``to`` is "megatron" or "hf".

    ``config_folder`` holds config.json and the tokenizer; by default the input does. ``parallel`` is a layout that the
    model is meant for: it is checked, and changes nothing in the files. ``mtp``: what becomes of multi-token-prediction
    layers; where the input has some, it must be said. Kept, they lie in ``_MTP_FOLDER`` of the distributed checkpoint,
    as safetensors. Errors: OSError, ModelError, WeightsError.
    """
    source, target = Path(input_folder), Path(output_folder)
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; give an output folder that does not, or remove it")
    if config_folder is None and source.is_dir() and not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source} holds no config.json; name a folder that does with --config-from")
    if to == "megatron" and (source / "metadata.json").is_file():
        raise WeightsError(f"{source} is a distributed checkpoint of Megatron already; --to hf converts it back")
    config_folder = Path(config_folder or source)
    config = load_hf_config(config_folder)
    check_layout(config, parallel)
    topology.initialize(ParallelConfig(), seed=0)
    try:
        if to == "megatron":
            return _to_megatron(config, source, config_folder, target, mtp, max_shard_bytes)
        return _to_hf(config, source, config_folder, target, mtp, max_shard_bytes)
    finally:
        topology.destroy()


@dataclass(frozen=True)
class Parameter:
    """One of Megatron's parameters: the tensors it is made of, and the pieces of the checkpoint that it becomes."""

    entry: Entry
    place: ShardedBase
    """A ShardedTensor, or the factory of several; without data."""

    def pieces(self, value: Tensor | None = None) -> list[ShardedTensor]:
        """Its pieces, with their parts of ``value`` where it is given."""
        place = self.place
        if value is not None:
            place = replace(place, data=value, **({} if _is_factory(place) else {"dtype": value.dtype}))
        return [place] if not _is_factory(place) else list(nested_values({"": place.build()}))

    def merge(self, parts: list[Tensor]) -> Tensor:
        """The parameter from the data of its pieces."""
        return self.place.merge_fn(parts) if _is_factory(self.place) else parts[0]


@dataclass(frozen=True)
class _Contents:
    """What the distributed checkpoint of a model holds."""

    parameters: list[Parameter]
    """In the order of Hugging Face files."""
    objects: list[ShardedObject]
    """States of layers that have none here, but that Megatron expects to find."""


def _contents_of(config: PretrainedConfig, role: Role) -> _Contents:
    """Learnt from a model that has no memory of its own."""
    build = policy.build_policy if role == "policy" else critic.build_critic
    with torch.device("meta"):
        (chunk,) = build(config, ParallelConfig(), dtype=torch.float32, seed=None)
        state = chunk.sharded_state_dict(metadata={"singleton_local_shards": False})
    objects = [value for value in state.values() if isinstance(value, ShardedObject)]
    places = {canonical_name(name): value for name, value in state.items() if not isinstance(value, ShardedObject)}
    parameters = [Parameter(entry, places.pop(entry.megatron)) for entry in entries(config, role)]
    if places:
        raise WeightsError(f"Megatron's parameter {next(iter(places))} has no rule for model_type {config.model_type}")
    return _Contents(parameters, objects)


def _is_factory(place: ShardedBase) -> bool:
    return isinstance(place, ShardedTensorFactory)


# Hugging Face to Megatron --------------------------------------------------------------------------------------------


def _to_megatron(
    config: PretrainedConfig,
    source: Path,
    config_folder: Path,
    target: Path,
    mtp: Mtp | None,
    max_shard_bytes: int,
) -> Conversion:
    checkpoint = CheckpointSource(source, stacked_shapes(config))
    role: Role = "critic" if VALUE_HEAD in checkpoint else "policy"
    expected = expected_names(config, role)
    left_out = _left_out(config, checkpoint, expected, mtp)
    kept = _kept(config, source, mtp)
    dtypes = {
        name: tensor[:0].dtype
        for entry in entries(config, role)
        for name, tensor in zip(entry.hf, read_entry(checkpoint, entry), strict=True)
    }
    planner = _StreamingPlanner(
        _contents_of(config, role), dtypes, lambda entry: _load_whole(entry, checkpoint, dims(config))
    )
    with _appearing(target) as folder:
        _write_checkpoint(planner, folder, target)
        _copy_config(config_folder, folder)
        if checkpoint.are_experts_transposed:
            (folder / _TRANSPOSED_MARK).touch()
        if kept:
            writer = FolderWriter(config_folder, folder / _MTP_FOLDER, max_shard_bytes)
            for name, tensor in mtp_tensors(config, source):
                writer.add(name, tensor)
            writer.finish_weights()
    num_bytes = sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in expected.items())
    num_bytes += writer.total_bytes if kept else 0
    return Conversion(len(expected) + len(kept), num_bytes, left_out)


def _write_checkpoint(planner: SavePlanner, folder: Path, target: Path) -> None:
    """Megatron's files, into ``folder``; OSError, speaking of ``target``, where they cannot be written."""
    try:
        dcp.save({}, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)
        TorchCommonSaveStrategy("torch", 1).save_common({"content_metadata": {"singleton_local_shards": False}}, folder)
        save_config(CheckpointingConfig("torch_dist"), str(folder))
    except (CheckpointException, OSError, RuntimeError) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            # It carries each rank's own failure, and here there is one rank.
            ((cause, _),) = error.failures.values()
        # torch.save tells of a disk that fills up by the bytes that it missed.
        if isinstance(cause, OSError) or "inline_container" in str(cause):
            reason = str(cause).splitlines()[0]
            raise OSError(f"{target} could not be written, is there space left? {reason}") from error
        raise cause from error


def _left_out(
    config: PretrainedConfig, checkpoint: CheckpointSource, expected: Mapping[str, Any], mtp: Mtp | None
) -> list[str]:
    unused = [name for name in checkpoint.files if name not in expected]
    unknown = [name for name in unused if not is_mtp(config, name) and not IGNORED_TENSORS.search(name)]
    if unknown:
        raise WeightsError(
            f"{checkpoint.folder} holds {len(unknown)} tensors that a {config.model_type} of "
            f"{text_config(config).num_hidden_layers} layers has no place for: {', '.join(unknown[:5])}"
        )
    return [name for name in unused if mtp is not Mtp.keep or not is_mtp(config, name)]


def _kept(config: PretrainedConfig, folder: Path, mtp: Mtp | None) -> list[str]:
    """The tensors of multi-token-prediction layers in ``folder`` (of safetensors, if it is there) that go over."""
    has_weights = any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    names = mtp_names(config, CheckpointSource(folder)) if has_weights else []
    if names and mtp is None:
        raise WeightsError(
            f"{folder} holds {len(names)} tensors of multi-token-prediction layers, {names[0]} first; say what becomes "
            "of them: --mtp keep carries them along, --mtp drop leaves them out"
        )
    if mtp is Mtp.keep and not names:
        raise WeightsError(f"{folder} holds no tensors of multi-token-prediction layers to keep; leave --mtp keep out")
    return names if mtp is Mtp.keep else []


def _load_whole(entry: Entry, checkpoint: CheckpointSource, sizes: Mapping[str, int]) -> Tensor:
    return entry.transform.load(read_entry(checkpoint, entry), sizes, _WHOLE)


class _StreamingPlanner(SavePlanner):
    """Plans all pieces by their shapes, and makes each one's data when the writer comes to it."""

    def __init__(self, contents: _Contents, dtypes: Mapping[str, torch.dtype], load: Callable[[Entry], Tensor]) -> None:
        self._load = load
        self._objects = {MetadataIndex(item.unique_key): item for item in contents.objects}
        self._items = [WriteItem(index, WriteItemType.BYTE_IO) for index in self._objects]
        self._piece_of: dict[MetadataIndex, tuple[Parameter, int]] = {}
        self._loaded: tuple[Parameter | None, list[ShardedTensor]] = (None, [])
        dtype_of_key: dict[str, tuple[torch.dtype, str]] = {}
        for parameter in contents.parameters:
            for name in parameter.entry.hf:
                for piece in parameter.pieces():
                    dtype, first = dtype_of_key.setdefault(piece.key, (dtypes[name], name))
                    if dtypes[name] != dtype:
                        raise WeightsError(
                            f"{name} is {dtypes[name]} but {first} is {dtype}: Megatron keeps both in one tensor, "
                            f"{piece.key}; bring them to one dtype"
                        )
            for place, piece in enumerate(parameter.pieces()):
                item = _write_item(piece, dtype_of_key[piece.key][0])
                self._items.append(item)
                self._piece_of[item.index] = (parameter, place)

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
        parameter, place = self._piece_of[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        if self._loaded[0] is not parameter:
            self._loaded = (None, [])
            self._loaded = (parameter, parameter.pieces(self._load(parameter.entry)))
        piece = self._loaded[1][place]
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
    """The piece's shape inside the global tensor, which may stack layers or experts along axes of its own."""
    return torch.Size((1,) * piece.prepend_axis_num + tuple(piece.local_shape))


# Megatron to Hugging Face --------------------------------------------------------------------------------------------


def _to_hf(
    config: PretrainedConfig,
    source: Path,
    config_folder: Path,
    target: Path,
    mtp: Mtp | None,
    max_shard_bytes: int,
) -> Conversion:
    checkpoint = _MegatronCheckpoint(source)
    role: Role = "critic" if checkpoint.holds_value_head() else "policy"
    parameters = _contents_of(config, role).parameters
    used = {piece.key for parameter in parameters for piece in parameter.pieces()}
    left_out = [key for key in checkpoint.tensors if key not in used]
    unknown = [key for key in left_out if not key.startswith(_NOT_WEIGHTS)]
    for parameter in parameters:
        for piece in parameter.pieces():
            checkpoint.check(piece, parameter.entry)
    if unknown:
        raise WeightsError(
            f"{source} holds {len(unknown)} tensors that a {config.model_type} of "
            f"{text_config(config).num_hidden_layers} layers has no place for: {', '.join(unknown[:5])}; check config.json"
        )
    # A checkpoint of a run holds trained layers alone: the others are in the folder that it started from.
    mtp_folder = source / _MTP_FOLDER if (source / _MTP_FOLDER).is_dir() else config_folder
    kept = _kept(config, mtp_folder, mtp)
    writer = FolderWriter(config_folder, target, max_shard_bytes, keeps_mtp=bool(kept))
    num_tensors = len(kept)
    transposed = stacked_shapes(config) if (source / _TRANSPOSED_MARK).exists() else {}
    try:
        for name, tensor in assemble(
            (parameter.entry, parameter.entry.transform.export([checkpoint.merged(parameter)], dims(config)))
            for parameter in parameters
        ):
            writer.add(name, tensor.transpose(1, 2).contiguous() if name in transposed else tensor)
            num_tensors += 1
        for name, tensor in mtp_tensors(config, mtp_folder) if kept else ():
            writer.add(name, tensor)
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    return Conversion(num_tensors, writer.total_bytes, left_out)


class _MegatronCheckpoint:
    """A distributed checkpoint, read piece by piece, whichever layout of ranks wrote it.

    Errors: FileNotFoundError where there is none, WeightsError for a broken one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = maybe_load_config(str(folder))
        if config is None:
            raise FileNotFoundError(
                f"{folder} is not a distributed checkpoint of Megatron: it holds no metadata.json; a Hugging Face folder "
                "becomes one with --to megatron"
            )
        if config.sharded_backend != "torch_dist":
            raise WeightsError(f"{folder} is in the format {config.sharded_backend!r}; only torch_dist is read")
        self._reader = dcp.FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError) as error:
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
        """Refuse a tensor that is missing or of another shape; a vocabulary may be padded at its end."""
        if piece.key not in self.tensors:
            raise WeightsError(f"{self.folder} holds no tensor {piece.key}, of which {next(iter(entry.hf))} is made")
        found, wanted = tuple(self.tensors[piece.key].size), tuple(piece.global_shape)
        may_be_longer = piece.allow_shape_mismatch and len(found) == len(wanted)
        if found != wanted and not (may_be_longer and found[0] >= wanted[0] and found[1:] == wanted[1:]):
            raise WeightsError(
                f"{self.folder}: {piece.key} has shape {found}, config.json asks for {wanted}; is it another model's?"
            )

    def merged(self, parameter: Parameter) -> Tensor:
        """The whole parameter."""
        return parameter.merge([self.read(piece) for piece in parameter.pieces()])

    def read(self, piece: ShardedTensor) -> Tensor:
        tensor, sizes = self.tensors[piece.key], _sizes(piece)
        target = torch.empty(sizes, dtype=tensor.properties.dtype)
        chunk = ChunkStorageMetadata(offsets=torch.Size(piece.global_offset), sizes=sizes)
        items = create_read_items_for_chunk_list(piece.key, tensor, [chunk])
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise WeightsError(f"{self.folder}: parts of {piece.key} are in none of the files")
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
    """Lets the reader copy its pieces into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = tuple(slice(o, o + n) for o, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self.target[index]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


# Folders -------------------------------------------------------------------------------------------------------------


class _appearing:
    """Context: a temporary folder beside ``target`` that takes its name when the block succeeds, else vanishes."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f".{self.target.name}.", dir=self.target.parent))
        return self.folder

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                self.folder.chmod(0o755)  # mkdtemp's own mode shuts everyone else out
                self.folder.rename(self.target)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def _copy_config(source: Path, target: Path) -> None:
    for pattern in ("config.json", *COPIED_FILES):
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, target)
