"""``megatron-rl convert`` for adapters: merges a run's checkpoint of adapters, or a folder of peft, into its base model.

Tensors of the base model are read, merged and written one at a time.
"""

from pathlib import Path

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.config.schema import LoraConfig
from megatron_rl.families.adapters import ADAPTER_FOLDER, PEFT_PREFIX, adapted_linears
from megatron_rl.families.model_facts import dims
from megatron_rl.families.parameters import entries, stacked_shapes
from megatron_rl.models.hf.adapter_folder import (
    CONFIG_FILE,
    read_adapter,
    read_adapter_config,
    targets_of,
    write_adapter,
)
from megatron_rl.models.hf.folder import FolderWriter
from megatron_rl.models.hf.tensor_sources import CheckpointSource, WeightsError
from megatron_rl.models.lora import merged_weight, scale_of
from megatron_rl.models.torch_dist import MegatronCheckpoint
from megatron_rl.system.files.atomic_files import atomic_folder


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
