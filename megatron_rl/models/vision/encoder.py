"""The vision encoder of a vision-language model: the module of transformers, as it is.

It turns patches into features of the language model's width, one for each image token: the last layer's, and for a
model with deepstack those of some layers before it. Images do not see each other. The merger that brings features to
that width is called the adapter; the rest is the encoder proper.
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
    """Cast and mark the encoder for training on this rank's device."""
    frequencies = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    encoder.to(dtype)
    for name, buffer in frequencies.items():
        # Rotary frequencies keep their precision, as transformers has them.
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
    """As ``gradient_checkpointing_enable``, which also makes the input need a gradient: frozen blocks would run backward."""
    for block in encoder.blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def encode(encoder: nn.Module, patches: Tensor, grids: Tensor) -> Tensor:
    """Features [image tokens, 1 + deepstack, hidden] of images given by patches [P, D] and grids [I, 3], I >= 1."""
    output = encoder(patches, grid_thw=grids, return_dict=True)
    return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", [])], dim=1)


def freeze(chunks: Sequence[nn.Module], *, train_encoder: bool, train_adapter: bool) -> None:
    """Take gradients from the parts that do not train; before the chunks are wrapped."""
    for name, parameter in _vision_parameters(chunks):
        is_adapter = name.startswith(ADAPTER)
        parameter.requires_grad_(train_adapter if is_adapter else train_encoder)


def _vision_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith("vision."):
                yield name.removeprefix("vision."), parameter
