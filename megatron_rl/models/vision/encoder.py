"""Prepares and runs the vision encoder of a vision-language model, the unchanged module of transformers.

The encoder turns patches into features of the language model's width, one per image token: features of its last layer,
and in models with DeepStack also features of earlier layers. Images do not attend to each other. The merger that
projects features to that width is called the adapter; the remaining layers are the encoder proper.
"""

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_rl.config.schema import Recompute
from megatron_rl.families.vision_encoder import ADAPTER
from megatron_rl.models.layers.torch_layers import mark_split_gradients

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_encoder(
    encoder: "PreTrainedModel", *, dtype: torch.dtype, recompute: Recompute, sequence_parallel: bool
) -> "PreTrainedModel":
    """Cast the encoder to ``dtype``, move it to this rank's device, and configure it for training."""
    frequencies = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    encoder.to(dtype)
    for name, buffer in frequencies.items():
        # Rotary frequencies keep their precision, as in transformers.
        parent, _, own = name.rpartition(".")
        setattr(encoder.get_submodule(parent), own, buffer)
    if torch.cuda.is_available():
        encoder.cuda()
        if dtype is torch.bfloat16 and importlib.util.find_spec("flash_attn") is not None:
            encoder.set_attn_implementation("flash_attention_2")
    if recompute is Recompute.full:
        _recompute_blocks(encoder)
    mark_split_gradients(encoder, sequence_parallel)
    return encoder


def _recompute_blocks(encoder: "PreTrainedModel") -> None:
    """Enable recomputation of the encoder's blocks.

    ``gradient_checkpointing_enable`` is not used, because it makes the input require a gradient: backward would then run
    through frozen blocks.
    """
    for block in encoder.blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def encode(encoder: nn.Module, patches: Tensor, grids: Tensor) -> Tensor:
    """Features [image tokens, 1 + deepstack, hidden] of images given by patches [P, D] and grids [I, 3], I >= 1."""
    output = encoder(patches, grid_thw=grids, return_dict=True)
    return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", [])], dim=1)


def freeze(chunks: Sequence[nn.Module], *, train_encoder: bool, train_adapter: bool) -> None:
    """Disable gradients of encoder or adapter if they do not train. Called before the chunks are wrapped."""
    for name, parameter in _vision_parameters(chunks):
        is_adapter = name.startswith(ADAPTER)
        parameter.requires_grad_(train_adapter if is_adapter else train_encoder)


def _vision_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith("vision."):
                yield name.removeprefix("vision."), parameter
