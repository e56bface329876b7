"""Rotary positions of a model, computed as in transformers."""

from typing import Any

import torch

from megatron_rl.families.family import ModelConfig, family_of
from megatron_rl.families.model_facts import dims, text_config


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Rotary parameters of a configuration of transformers 5 (``rope_parameters``) or older versions (two fields)."""
    config = text_config(config)
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        rope = {"rope_theta": config.rope_theta, **(getattr(config, "rope_scaling", None) or {})}
    return {"rope_type": "default", **rope}


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Frequencies of the rotary embedding, [rotated dimensions / 2] float32, and its factor on cosine and sine.

    Both are computed by the functions of transformers, or by the same formula for the default type.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_parameters(config)
    # On the CPU explicitly, because the caller may be building a model on the meta device.
    with torch.device("cpu"):
        if rope["rope_type"] == "default":
            head = text_config(config).qk_rope_head_dim if family_of(config).is_latent else dims(config)["head_dim"]
            size = int(head * rope.get("partial_rotary_factor", 1.0))
            return 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)), 1.0
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](text_config(config), torch.device("cpu"))
        return frequencies, float(factor)
