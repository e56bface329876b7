"""The vision encoder of transformers: the module, and the names and shapes of its parameters."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from megatron_rl.families.family import ModelConfig

VISION_KWARGS = dict(apply_rope_fusion=False)
"""What every vision-language model adds to TransformerConfig: the fused kernel knows one position per token."""
ADAPTER = ("merger.", "deepstack_merger_list.")
"""Beginnings of the names of the adapter's parameters."""


def build_encoder(vision_config: ModelConfig) -> nn.Module:
    """The module with uninitialised weights, float32, on torch's current device."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return AutoModel.from_config(vision_config, attn_implementation="sdpa")


def parameter_shapes(vision_config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of each of the encoder's parameters, in its order."""
    return _shapes(vision_config.to_json_string(use_diff=False), type(vision_config).from_dict)


@functools.lru_cache(maxsize=8)
def _shapes(json_text: str, config_of: Callable[[dict[str, Any]], ModelConfig]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        encoder = build_encoder(config_of(json.loads(json_text)))
    return {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters()}


def num_deepstack(vision_config: ModelConfig) -> int:
    """Layers of the language model that get features of their own."""
    # One that names a layer past the last gives nothing.
    return len(set(getattr(vision_config, "deepstack_visual_indexes", None) or ()) & set(range(vision_config.depth)))
