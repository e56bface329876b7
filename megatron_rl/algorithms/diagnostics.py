"""Values, returns and advantages by position in the response: float64 sums and counts that merge by addition.

Explained variance is in ``value_loss``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.algorithms.loss import mask_to_bool
from megatron_rl.algorithms.sequences import counts_by_sequence
from megatron_rl.algorithms.shapes import check_cu_seqlens, check_float_vector, check_mask, check_same_kind
from megatron_rl.algorithms.token_sums import array, run, sums_by_position


@torch.no_grad()
def value_by_position(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    num_bins: int,
    names: Sequence[str] = ("value", "return", "advantage"),
) -> dict[str, tuple[Tensor, Tensor]]:
    """Values, returns and advantages along the response: a critic free of initialization bias has no slope (VC-PPO).

    The counted tokens of a sequence are spread over the bins in order: token r (from 0) of n falls into bin
    ``floor(r * num_bins / n)``. Prompt tokens outside the mask do not shift positions.

    Args:
        values, returns: [T] float32 or float64, same dtype and device.
        mask: [T] 0/1 of any real dtype.
        cu_seqlens: [N+1] int32 or int64.
        num_bins: at least 1.
        names: a selection of "value", "return" and "advantage" (return minus value).

    Returns:
        For each of ``names``: (sum [num_bins], count [num_bins]), float64. Batches merge by adding both; the mean is
        sum / count where the count is not 0.
    """
    check_float_vector("values", values)
    check_same_kind("returns", returns, "values", values)
    check_mask(mask, "values", values)
    bounds = check_cu_seqlens(cu_seqlens, len(values))
    if num_bins != int(num_bins) or num_bins < 1:
        raise ValueError(f"num_bins: expected a whole number of at least 1, got {num_bins!r}")
    inside, counts = mask_to_bool(mask), counts_by_sequence(mask, bounds)
    # Where bin b of n tokens starts: the first r with r * num_bins // n = b.
    starts = (counts[:, None] * torch.arange(int(num_bins) + 1) + int(num_bins) - 1) // int(num_bins)
    tokens = starts.diff(dim=1).sum(0).double().to(values.device)
    value, target = torch.zeros(2, int(num_bins), dtype=torch.float64)
    # array() shares memory with its tensor, so the loop adds to ``value`` and ``target`` in place.
    for per_token, sums in ((values, value), (returns, target)):
        run(sums_by_position, array(per_token), array(inside), array(bounds), array(starts), array(sums))
    columns = {"value": value, "return": target, "advantage": target - value}
    return {name: (columns[name].to(values.device), tokens) for name in names}
