"""What the critic says along a response: sums and counts in float64 that batches and ranks merge by addition.

Explained variance is in ``value_loss``.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.loss import chosen
from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
from megatron_rl.algorithms.shapes import check_cu_seqlens, check_float_vector, check_mask, check_same_kind


@torch.no_grad()
def value_by_position(
    values: Tensor, returns: Tensor, mask: Tensor, cu_seqlens: Tensor, num_bins: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Values, returns and advantages along the response: a critic free of initialisation bias has no slope (VC-PPO).

    The counted tokens of a sequence, taken in order, are spread over the bins: of n tokens number r (from 0) falls
    into bin ``floor(r * num_bins / n)``. Prompt tokens outside the mask do not shift positions.

    Args:
        values, returns: [T] float32 or float64, same dtype and device.
        mask: [T] 0/1 of any real dtype.
        cu_seqlens: [N+1] int32 or int64.
        num_bins: at least 1.

    Returns:
        "value", "return" and "advantage" (return minus value), each as (sum [num_bins], count [num_bins]), float64.
        Batches merge by adding both; the mean is sum / count where the count is not 0.
    """
    check_float_vector("values", values)
    check_same_kind("returns", returns, "values", values)
    check_mask(mask, "values", values)
    bounds = check_cu_seqlens(cu_seqlens, len(values))
    if num_bins != int(num_bins) or num_bins < 1:
        raise ValueError(f"num_bins: expected a whole number of at least 1, got {num_bins!r}")
    inside = mask != 0
    sequence_of = chosen(sequence_index(bounds, values.device), inside)
    counts = sequence_sums(torch.ones_like(sequence_of), sequence_of, len(bounds) - 1)
    firsts = counts.cumsum(0) - counts
    ranks = torch.arange(len(sequence_of), device=values.device) - firsts[sequence_of]
    bins = ranks * int(num_bins) // counts[sequence_of]
    value, target = chosen(values, inside).double(), chosen(returns, inside).double()
    tokens = sequence_sums(torch.ones_like(value), bins, int(num_bins))
    columns = {"value": value, "return": target, "advantage": target - value}
    return {name: (sequence_sums(column, bins, int(num_bins)), tokens) for name, column in columns.items()}
