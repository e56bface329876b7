"""DAPO's soft penalty on overlong responses (arXiv 2503.14476).

The penalty applies to whole responses and their budget; the end of a window never counts as overlong.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.shapes import float_lengths


@torch.no_grad()
def soft_overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft penalty, which the caller adds to the reward (arXiv 2503.14476).

    The penalty is 0 up to ``max_length - buffer`` tokens, falls linearly to -1 at ``max_length`` and is -1 beyond.

    Args:
        lengths: [N] response lengths in tokens, integer or float.
        max_length: L_max in tokens.
        buffer: L_cache in tokens, from 0 (a step at L_max) to ``max_length``.

    Returns:
        [N] in the dtype of float lengths, float64 for integer ones.
    """
    floating = float_lengths("lengths", lengths)
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer: expected 0 <= buffer <= max_length = {max_length}, got {buffer!r}")
    if buffer == 0:
        return torch.where(floating > max_length, -1.0, 0.0).to(floating.dtype)
    return ((max_length - buffer - floating) / buffer).clamp(-1.0, 0.0)
