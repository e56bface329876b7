"""``megatron-rl convert``: converts between a Hugging Face folder and Megatron's distributed checkpoint (torch_dist).

Invariants: tensors are read, rearranged and written one parameter at a time, so memory contains one parameter and,
in the direction of Hugging Face, the file being filled; a round trip keeps the bits and dtypes of every tensor;
nothing is written before every tensor has been found with its shape; the output folder appears once it is complete.
One process, no GPU. A distributed checkpoint does not depend on a parallel layout: any layout loads it.

Adapters, of a run's checkpoint or of a folder of peft, are merged into their base model in the same way.
"""

import os
from pathlib import Path

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.config.schema import LoraConfig, Mtp, ParallelConfig
from megatron_rl.families.adapters import ADAPTER_FOLDER, PEFT_PREFIX, adapted_linears
from megatron_rl.families.model_facts import dims
from megatron_rl.families.parameters import VALUE_HEAD, Role, entries, stacked_shapes
from megatron_rl.families.transforms import Shard
from megatron_rl.models.hf.adapter_folder import (
    CONFIG_FILE,
    read_adapter,
    read_adapter_config,
    targets_of,
    write_adapter,
)
from megatron_rl.models.hf.folder import FolderWriter, copy_files
from megatron_rl.models.hf.megatron_config import check_layout
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.tensor_sources import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointSource,
    WeightsError,
    is_mtp,
    mtp_names,
    mtp_tensors,
)
from megatron_rl.models.hf.weights import (
    assemble,
    check_no_unknown_tensors,
    expected_names,
    own_tensors,
    read_entry,
    unused,
)
from megatron_rl.models.lora import merged_weight, scale_of
from megatron_rl.models.torch_dist import MegatronCheckpoint, contents_of, write_checkpoint
from megatron_rl.parallel import topology
from megatron_rl.system.files.atomic_files import atomic_folder

_WHOLE = Shard(0, 1)
_MTP_FOLDER = "mtp"
"""Subfolder of a distributed checkpoint with the multi-token-prediction layers, which are not part of Megatron's model."""
_TRANSPOSED_MARK = "experts_as_transformers_saves_them"
"""Empty file that marks stacked experts as transposed in the source, so that ``--to hf`` restores this (``CheckpointSource``)."""
_NOT_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine_state")
"""Prefixes of keys in training checkpoints that are not weights."""
Conversion = tuple[int, int, list[str]]
"""(number of converted Hugging Face tensors, their bytes, tensors of the input that are not in the output)."""


def has_adapters(folder: Path) -> bool:
    """Return whether ``folder`` is a checkpoint of adapters or a folder of peft."""
    return (folder / CONFIG_FILE).is_file()


def merge_adapters(
    config: PretrainedConfig, source: Path, base: Path, target: Path, max_shard_bytes: int
) -> tuple[int, int, list[str]]:
    """Write the model of ``base`` with the adapters of ``source`` merged, and the adapters as peft writes them.

    Returns (number of tensors, bytes, nothing left out). Raises WeightsError, OSError.
    """
    settings = read_adapter_config(source)
    lora = LoraConfig(
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        rslora=bool(settings.get("use_rslora")),
        targets=targets_of(settings),
    )
    is_checkpoint = (source / "metadata.json").is_file()
    adapters = _from_checkpoint(config, source, lora) if is_checkpoint else read_adapter(source, config, lora)
    scale = scale_of(lora)
    weights, num_tensors = CheckpointSource(base, stacked_shapes(config)), 0
    with atomic_folder(target) as folder:
        writer = FolderWriter(base, folder, target=target, max_shard_bytes=max_shard_bytes)
        for name, shape in {
            name: shape for entry in entries(config, "policy") for name, shape in entry.hf.items()
        }.items():
            writer.add(name, _merged(weights.read(name, shape)[:], name, adapters, scale))
            num_tensors += 1
        writer.finish()
        write_adapter(folder / ADAPTER_FOLDER, settings, adapters)
    return num_tensors, writer.total_bytes, []


def _merged(weight: Tensor, name: str, adapters: dict[str, Tensor], scale: float) -> Tensor:
    module = PEFT_PREFIX + name.removesuffix(".weight")
    a, b = adapters.get(f"{module}.lora_A.weight"), adapters.get(f"{module}.lora_B.weight")
    return weight if a is None or b is None else merged_weight(weight, [a], [b], scale)


def _from_checkpoint(config: PretrainedConfig, folder: Path, lora: LoraConfig) -> dict[str, Tensor]:
    checkpoint = MegatronCheckpoint(folder)
    tensors: dict[str, Tensor] = {}
    if checkpoint.holds_value_head():
        raise WeightsError(f"{folder} is a critic's; its adapters are merged in the model folders that the run saves")
    for linear in adapted_linears(config, lora.targets, lora.rank):
        for entry in (linear.a, linear.b):
            (shape, *_), number = entry.shapes, sum(shape[0] for shape in entry.shapes)
            # The parameter of one rank: the modules' tensors, whose first dimensions add up.
            piece = ShardedTensor.from_rank_offsets(entry.megatron, torch.empty(number, *shape[1:], device="meta"))
            checkpoint.check(piece, entry)
            whole = entry.transform.export([checkpoint.read(piece)], dims(config))
            named = dict(zip(entry.hf, whole, strict=True))
            tensors |= {name: named[name].contiguous() for name in linear.adapted(entry)}
    return tensors


def convert(
    input_folder: str | Path,
    output_folder: str | Path,
    *,
    to: str,
    config_folder: str | Path | None = None,
    parallel: ParallelConfig | None = None,
    mtp: Mtp | None = None,
    max_shard_bytes: int,
) -> Conversion:
    """Convert ``input_folder`` into ``output_folder``, which must not exist; ``to`` is "megatron" or "hf".

    Args:
        input_folder, output_folder: source and target.
        to: "megatron" or "hf".
        config_folder: folder with config.json and the tokenizer; by default the input folder.
        parallel: a layout in which the model will run (default: one rank). It is checked and does not change the files.
        mtp: keep or drop multi-token-prediction layers; required if the input has some. Kept layers are stored as
            safetensors in ``_MTP_FOLDER`` of the distributed checkpoint.
        max_shard_bytes: largest size of a safetensors file.

    Raises:
        OSError, ModelError, WeightsError: input or output cannot be read or written, or do not match config.json.
    """
    source, target = Path(input_folder), Path(output_folder)
    # Also true for a broken link, which the final rename would replace.
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; give an output folder that does not, or remove it")
    if config_folder is None and source.is_dir() and not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source} has no config.json; name a folder that has one with --config-from")
    if to == "megatron" and (source / "metadata.json").is_file():
        raise WeightsError(f"{source} is already a distributed checkpoint of Megatron; --to hf converts it back")
    config_folder = Path(config_folder or source)
    if to == "megatron" and has_adapters(source):
        raise WeightsError(f"{source} holds adapters; --to hf merges them into the model of --config-from")
    config = load_hf_config(config_folder)
    check_layout(config, parallel or ParallelConfig())
    # Megatron's modules, from which the names and shapes come, need process groups.
    topology.initialize(ParallelConfig(), seed=0)
    try:
        if to == "megatron":
            return _to_megatron(config, source, config_folder, target, mtp, max_shard_bytes)
        if has_adapters(source):
            return merge_adapters(config, source, config_folder, target, max_shard_bytes)
        return _to_hf(config, source, config_folder, target, mtp, max_shard_bytes)
    finally:
        topology.destroy()


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
    left_out = [
        name for name in unused(config, checkpoint, role) if mtp is not Mtp.keep or not is_mtp(config, name)
    ]
    kept = _kept(config, source, mtp)
    dtypes = {
        # An empty slice reads no data of the file.
        name: tensor[:0].dtype
        for entry in entries(config, role)
        for name, tensor in zip(entry.hf, read_entry(checkpoint, entry), strict=True)
    }
    sizes = dims(config)
    with atomic_folder(target) as folder:
        write_checkpoint(
            contents_of(config, role),
            lambda entry: entry.transform.load(read_entry(checkpoint, entry), sizes, _WHOLE),
            folder,
            dtypes=dtypes,
            target=target,
        )
        copy_files(config_folder, folder, "config.json")
        if checkpoint.are_experts_transposed:
            (folder / _TRANSPOSED_MARK).touch()
        if kept:
            (folder / _MTP_FOLDER).mkdir()
            writer = FolderWriter(config_folder, folder / _MTP_FOLDER, target=target, max_shard_bytes=max_shard_bytes)
            for name, tensor in mtp_tensors(config, source):
                writer.add(name, tensor)
            writer.finish_weights()
    num_bytes = sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in expected.items())
    num_bytes += writer.total_bytes if kept else 0
    return len(expected) + len(kept), num_bytes, left_out


def _kept(config: PretrainedConfig, folder: Path, mtp: Mtp | None) -> list[str]:
    """Names of the multi-token-prediction tensors in ``folder`` (if it has safetensors) to be converted.

    Raises WeightsError if ``mtp`` is None and there are such tensors, or if it is ``keep`` and there are none.
    """
    has_weights = any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    names = mtp_names(config, CheckpointSource(folder)) if has_weights else []
    if names and mtp is None:
        raise WeightsError(
            f"{folder} has {len(names)} tensors of multi-token-prediction layers, {names[0]} first; choose how they are "
            "handled: --mtp keep copies them, --mtp drop omits them"
        )
    if mtp is Mtp.keep and not names:
        raise WeightsError(f"{folder} has no tensors of multi-token-prediction layers to keep; omit --mtp keep")
    return names if mtp is Mtp.keep else []


# Megatron to Hugging Face --------------------------------------------------------------------------------------------


def _to_hf(
    config: PretrainedConfig,
    source: Path,
    config_folder: Path,
    target: Path,
    mtp: Mtp | None,
    max_shard_bytes: int,
) -> Conversion:
    checkpoint = MegatronCheckpoint(source)
    role: Role = "critic" if checkpoint.holds_value_head() else "policy"
    parameters, _ = contents_of(config, role)
    used = {piece.key for parameter in parameters for piece in parameter.pieces()}
    left_out = [key for key in checkpoint.tensors if key not in used]
    unknown = [key for key in left_out if not key.startswith(_NOT_WEIGHTS)]
    for parameter in parameters:
        for piece in parameter.pieces():
            checkpoint.check(piece, parameter.entry)
    check_no_unknown_tensors(config, source, unknown)
    # A run's checkpoint has trained layers only: the multi-token-prediction layers are in the folder that it started from.
    mtp_folder = source / _MTP_FOLDER if (source / _MTP_FOLDER).is_dir() else config_folder
    kept = _kept(config, mtp_folder, mtp)
    num_tensors = len(kept)
    transposed = stacked_shapes(config) if (source / _TRANSPOSED_MARK).exists() else {}
    parts = (
        (parameter.entry, parameter.entry.transform.export([checkpoint.merged(parameter)], dims(config)))
        for parameter in parameters
    )
    with atomic_folder(target) as folder:
        writer = FolderWriter(
            config_folder, folder, target=target, max_shard_bytes=max_shard_bytes, keeps_mtp=bool(kept)
        )
        for name, tensor in own_tensors(assemble(parts)):
            writer.add(name, tensor.transpose(1, 2).contiguous() if name in transposed else tensor)
            num_tensors += 1
        for name, tensor in mtp_tensors(config, mtp_folder) if kept else ():
            writer.add(name, tensor)
        writer.finish()
    return num_tensors, writer.total_bytes, left_out
