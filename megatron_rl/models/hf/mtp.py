"""Multi-token-prediction layers (DeepSeek-V3, GLM-4-MoE): tensors of a checkpoint that are carried along or left out.

They are never built and never trained. Kept, they are copied from the source folder bit by bit, in their own dtype,
into every folder that is saved, and config.json goes on counting them; dropped, config.json counts none. After training
they still are those of the model that was started from.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.families.family import family_of
from megatron_rl.families.model_facts import num_mtp_layers, text_config
from megatron_rl.models.hf.tensor_sources import CheckpointSource, WeightsError


def is_mtp(config: PretrainedConfig, name: str) -> bool:
    """Whether tensor ``name`` belongs to a multi-token-prediction layer.

    Files number them after the decoder's layers, and config.json counts them (``Family.num_mtp_layers``).
    """
    match = re.match(r"model\.layers\.(\d+)\.", name)
    first, count = text_config(config).num_hidden_layers, num_mtp_layers(config)
    return match is not None and first <= int(match[1]) < first + count


def mtp_names(config: PretrainedConfig, source: CheckpointSource) -> list[str]:
    """Tensors of ``source`` that belong to such layers, in its order."""
    return [name for name in source.files if is_mtp(config, name)]


def mtp_tensors(config: PretrainedConfig, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every such tensor in ``folder``, one in memory at a time."""
    source = CheckpointSource(folder)
    for name in mtp_names(config, source):
        yield name, source.read_whole(name)


def check_mtp_present(config: PretrainedConfig, folder: str | Path, *, remedy: str) -> None:
    """Raises WeightsError where ``folder`` holds no such tensor, so that there is nothing to keep."""
    if not mtp_names(config, CheckpointSource(folder)):
        raise WeightsError(
            f"{folder} holds no tensors of multi-token-prediction layers (config.json: {family_of(config).num_mtp_layers} "
            f"{num_mtp_layers(config)}), so there is nothing to keep; {remedy}"
        )


def mtp_note(config: PretrainedConfig, folder: str | Path, *, keeps: bool) -> str:
    """What happens to the layers of a policy that starts from ``folder``; empty where it has none."""
    count = len(mtp_names(config, CheckpointSource(folder)))
    if not count:
        return ""
    fate = "kept as they are, untrained (policy.mtp=keep)" if keeps else "left out (policy.mtp=drop)"
    return f"multi-token-prediction layers: {count} tensors of {folder} are {fate}"
