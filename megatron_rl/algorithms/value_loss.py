"""The critic's loss, its explained variance, and values by position in the response."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.algorithms.cpu_loops import array, run, sums_by_position, target_and_error
from megatron_rl.algorithms.loss import Loss, keep, mask_to_bool, mask_total, masked_sum, weighted_sum
from megatron_rl.algorithms.sequences import counts_by_sequence
from megatron_rl.algorithms.shapes import (
    check_cu_seqlens,
    check_float_vector,
    check_mask,
    check_not_negative,
    check_same_kind,
    describe,
)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    coefficients: Tensor | None = None,
) -> Loss:
    """Squared error of the critic, clipped around its old values.

    ``0.5 * max((v - R)^2, (clip(v, v_old - clip_low, v_old + clip_high) - R)^2)`` per token. The factor 0.5 is part of
    the sum, so the gradient of an unclipped token is ``v - R``.

    Args:
        values: [T] float32 or float64, with gradient.
        old_values, returns: [T], same dtype and device; taken as constants.
        mask: [T] 1 for the tokens to train (0/1 of any real dtype).
        clip_low, clip_high: at least 0; None: no bound on that side.
        coefficients: [T] float32 or float64 from ``token_coefficients``; multiply the tokens' losses and sum up to the
            denominator. None: 1.

    Returns:
        Loss per token. Metrics: ``clip_fraction`` (tokens whose clipped error exceeds the unclipped error),
        ``squared_error`` (unclipped, without the 0.5), ``value_mean``, ``return_mean``.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
    """
    check_float_vector("values", values)
    check_same_kind("old_values", old_values, "values", values)
    check_same_kind("returns", returns, "values", values)
    check_mask(mask, "values", values)
    values = keep(values, mask)
    old_values = keep(old_values.detach(), mask)
    returns = keep(returns.detach(), mask)
    lowest = None if clip_low is None else old_values - check_not_negative("clip_low", clip_low)
    highest = None if clip_high is None else old_values + check_not_negative("clip_high", clip_high)
    unclipped = (values - returns).square()
    clipped = unclipped
    if lowest is not None or highest is not None:
        clipped = (values.clamp(lowest, highest) - returns).square()
    token_loss = 0.5 * torch.maximum(unclipped, clipped)

    with torch.no_grad():
        num_tokens = mask_total(mask, values.dtype)
        per_token = {
            "clip_fraction": (clipped > unclipped).to(values.dtype),
            "squared_error": unclipped,
            "value_mean": values,
            "return_mean": returns,
        }
        metrics = {name: (masked_sum(value, mask), num_tokens) for name, value in per_token.items()}
    return Loss(*weighted_sum(token_loss, mask, coefficients=coefficients), metrics)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """``1 - Var[R - V] / Var[R]`` over the tokens in the mask, [] float64 (VC-PPO, arXiv 2503.01491).

    A perfect critic has 1, a critic that predicts the mean has 0, a worse critic has less. 0 if the returns do not vary.
    """
    return explained_variance_of(explained_variance_stats(values, returns, mask))


@torch.no_grad()
def explained_variance_stats(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Sums for ``explained_variance_of``, [5] float64: count, sums of R and R^2, sums of R - V and (R - V)^2.

    Batches merge by addition, so an all-reduce with SUM merges ranks.

    Args:
        values, returns: [T] float32 or float64, same dtype and device.
        mask: [T] 0/1 of any real dtype.
    """
    check_float_vector("values", values)
    check_same_kind("returns", returns, "values", values)
    check_mask(mask, "values", values)
    stats = run(target_and_error, array(values), array(returns), array(mask_to_bool(mask)))
    return torch.tensor(stats, dtype=torch.float64, device=values.device)


def explained_variance_of(stats: Tensor) -> Tensor:
    """Explained variance, [] float64, of merged ``explained_variance_stats`` [5]."""
    if not isinstance(stats, Tensor) or stats.shape != (5,):
        raise ValueError(f"stats: expected the [5] tensor of explained_variance_stats, got {describe(stats)}")
    count, target_sum, target_squares, error_sum, error_squares = stats.double().unbind()
    # Variances times count. Rounding may give constant values a tiny variance of either sign, hence the threshold.
    target_spread = target_squares - target_sum.square() / count.clamp(min=1)
    error_spread = error_squares - error_sum.square() / count.clamp(min=1)
    varies = target_spread > 1e-12 * target_squares
    return torch.where(varies, 1.0 - error_spread.clamp(min=0) / torch.where(varies, target_spread, 1.0), 0.0)


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
