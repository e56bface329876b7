"""What becomes of responses that are too long: DAPO's soft penalty and its alternative, the filter (arXiv 2503.14476).

Both are about whole responses and their budget: a window's edge is never an overlong response.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.shapes import check_cu_seqlens, check_per_sequence, float_lengths


@torch.no_grad()
def soft_overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft penalty, to be added to the reward (arXiv 2503.14476).

    0 up to ``max_length - buffer`` tokens, falling linearly to -1 at ``max_length``, -1 beyond.

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


@torch.no_grad()
def overlong_filter_mask(truncated: Tensor, cu_seqlens: Tensor) -> Tensor:
    """False on every token of a truncated response: it trains nothing.

    Args:
        truncated: [N] bool, integer or float; not 0 marks a response that was cut at its budget (one that stops on its
            own with the last token of the budget was not).
        cu_seqlens: [N+1] int32 or int64.

    Returns:
        [T] bool on the device of ``cu_seqlens``; to be combined with the mask by ``&``.
    """
    bounds = check_cu_seqlens(cu_seqlens)
    check_per_sequence("truncated", truncated, len(bounds) - 1)
    complete = (truncated == 0).to(cu_seqlens.device)
    return complete.repeat_interleave(bounds.diff().to(cu_seqlens.device))
