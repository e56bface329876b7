"""The language model of this project inside Megatron's wrappers."""

from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import nn


class PackedGPTModel(GPTModel):
    """A GPTModel of this project: its last stage returns what the policy's or critic's functions take."""

    real_vocab_size: int
    """Tokens of the tokenizer's model; the output layer may be padded beyond it."""
    fp32_head: bool = False
    """The gradients of the logits stay in float32 next to a bfloat16 model too; the logits always are."""
    excluded_token_ids: tuple[int, ...]
    """Of a policy: ids that no response contains, those of images; they have no probability."""


def unwrap(chunk: nn.Module) -> PackedGPTModel:
    """The model inside Megatron's wrappers (distributed data parallel)."""
    inner: Any = chunk
    while not isinstance(inner, PackedGPTModel):
        inner = inner.module
    return inner
