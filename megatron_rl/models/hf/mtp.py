"""Multi-token-prediction layers (DeepSeek-V3, GLM-4-MoE): copies their tensors into saved folders, or omits them.

These layers are never built and never trained. If kept, their tensors are copied unchanged from the source folder into
every saved folder, and config.json keeps their number. If dropped, config.json's number is 0. After training, kept
layers are still the layers of the initial model.
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
    """Return whether tensor ``name`` belongs to a multi-token-prediction layer.

    Files number these layers after the decoder's layers; config.json has their number (``Family.num_mtp_layers``).
    """
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
