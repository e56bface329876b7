"""Critic diagnostics from sufficient statistics: sums and counts in float64 that batches and ranks merge by addition.

Explained variance lives beside the value loss.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
from megatron_rl.algorithms.shapes import (
    check_cu_seqlens,
    check_float_vector,
    check_mask,
    check_same_kind,
    describe,
)


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
    sequence_of = sequence_index(bounds, values.device)[inside]
    counts = sequence_sums(torch.ones_like(sequence_of), sequence_of, len(bounds) - 1)
    firsts = counts.cumsum(0) - counts
    ranks = torch.arange(len(sequence_of), device=values.device) - firsts[sequence_of]
    bins = ranks * int(num_bins) // counts[sequence_of]
    value, target = values[inside].double(), returns[inside].double()
    tokens = sequence_sums(torch.ones_like(value), bins, int(num_bins))
    columns = {"value": value, "return": target, "advantage": target - value}
    return {name: (sequence_sums(column, bins, int(num_bins)), tokens) for name, column in columns.items()}


@torch.no_grad()
def split_statistics(x: Tensor, mask: Tensor, finished: Tensor) -> dict[str, float]:
    """Mean and standard deviation of finished and of unfinished responses' tokens, see ``split_statistics_of``."""
    return split_statistics_of(split_statistics_stats(x, mask, finished))


@torch.no_grad()
def split_statistics_stats(x: Tensor, mask: Tensor, finished: Tensor) -> Tensor:
    """What ``split_statistics_of`` needs, [2, 3] float64: count, sum, sum of squares; finished first, then unfinished.

    Batches merge by addition, so an all-reduce with SUM merges ranks.

    Args:
        x: [T] float32 or float64: returns or advantages.
        mask: [T] 0/1 of any real dtype.
        finished: [T] of any real dtype; not 0 on the tokens of responses that ended.
    """
    check_float_vector("x", x)
    check_mask(mask, "x", x)
    if not isinstance(finished, Tensor) or finished.is_complex() or finished.shape != x.shape:
        raise ValueError(
            f"finished: expected one flag a token, a tensor of shape {list(x.shape)}, got {describe(finished)}; "
            "repeat flags of sequences with repeat_interleave"
        )
    ended = finished.to(x.device) != 0
    rows = []
    for side in (ended, ~ended):
        numbers = x[(mask != 0) & side].double()
        rows.append(torch.stack([numbers.new_tensor(float(len(numbers))), numbers.sum(), numbers.square().sum()]))
    return torch.stack(rows)


def split_statistics_of(stats: Tensor) -> dict[str, float]:
    """Numbers of merged ``split_statistics_stats`` [2, 3].

    Returns:
        finished_count, finished_mean, finished_std, and the same of unfinished; the standard deviation is the
        population's (n). A side without tokens has its count alone.
    """
    if not isinstance(stats, Tensor) or stats.shape != (2, 3):
        raise ValueError(f"stats: expected the [2, 3] tensor of split_statistics_stats, got {describe(stats)}")
    numbers = {}
    for side, (count, total, squares) in zip(("finished", "unfinished"), stats.double().tolist()):
        numbers[f"{side}_count"] = count
        if count > 0:
            mean = total / count
            # Rounding may leave equal numbers with a tiny variance of either sign.
            variance = squares / count - mean * mean
            numbers[f"{side}_mean"] = mean
            numbers[f"{side}_std"] = variance**0.5 if variance > 1e-12 * squares / count else 0.0
    return numbers
