"""The GPTModel subclass of this project, and access to it through Megatron's wrappers."""

from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import nn


class PackedGPTModel(GPTModel):
    """A GPTModel whose last stage returns the input of ``policy.token_logprobs`` or ``critic.token_values``."""

    real_vocab_size: int
    """Vocabulary size of the model; the output layer may be padded beyond it."""
    fp32_head: bool = False
    """True keeps the gradients of the logits in float32 even in a bfloat16 model; the logits always are float32."""
    excluded_token_ids: tuple[int, ...]
    """Ids of images, which no response contains and which have probability 0 (policy only)."""


def unwrap(chunk: nn.Module) -> PackedGPTModel:
    """The model inside Megatron's wrappers (distributed data parallel)."""
    inner: Any = chunk
    while not isinstance(inner, PackedGPTModel):
        inner = inner.module
    return inner
