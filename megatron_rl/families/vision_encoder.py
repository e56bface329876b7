"""The vision encoder of transformers: the module, and the names and shapes of its parameters."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from megatron_rl.families.family import ModelConfig

VISION_KWARGS = dict(apply_rope_fusion=False)
"""TransformerConfig arguments of every vision-language model: the fused kernel supports one position per token only."""
ADAPTER = ("merger.", "deepstack_merger_list.")
"""Prefixes of the adapter's parameter names."""


def build_encoder(vision_config: ModelConfig) -> nn.Module:
    """The encoder with uninitialized float32 weights, on torch's current device."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return AutoModel.from_config(vision_config, attn_implementation="sdpa")


def parameter_shapes(vision_config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Maps the encoder's parameter names to their shapes, in the module's order."""
    return _shapes(vision_config.to_json_string(use_diff=False), type(vision_config).from_dict)


@functools.lru_cache(maxsize=8)
def _shapes(json_text: str, make_config: Callable[[dict[str, Any]], ModelConfig]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        encoder = build_encoder(make_config(json.loads(json_text)))
    return {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters()}


def num_deepstack(vision_config: ModelConfig) -> int:
    """Number of language-model layers that receive their own features from the encoder (DeepStack)."""
    # Intersected with the range, because an index past the encoder's last layer gives no features.
    return len(set(getattr(vision_config, "deepstack_visual_indexes", None) or ()) & set(range(vision_config.depth)))
