"""Averages token losses: over all tokens, or first within each response.

Invariants: the coefficients of the counted tokens sum to the denominator. Coefficients and denominator depend only on the
given sequences, so denominators add over micro-batches and ranks as long as no sequence is split.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
from megatron_rl.algorithms.shapes import check_cu_seqlens, check_mask_vector, describe


def _num_counted_tokens(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return mask.count_nonzero()


@register.aggregation("token_mean", denominator=_num_counted_tokens)
def _token_mean(mask: Tensor) -> Tensor:
    """Every token has the same weight, so long responses count more (DAPO, arXiv 2503.14476)."""
    return torch.ones_like(mask, dtype=torch.float64)


def _num_counted_sequences(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return counted_sequences(mask, check_cu_seqlens(cu_seqlens, len(mask))).sum()


@register.aggregation("sequence_mean", denominator=_num_counted_sequences)
def _sequence_mean(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over a response's tokens first, then over responses (GRPO, arXiv 2402.03300)."""
    bounds = check_cu_seqlens(cu_seqlens, len(mask))
    sequence_of = sequence_index(bounds, mask.device)
    # Sequences without counted tokens give inf, which ``token_coefficients`` replaces by 0.
    return 1.0 / sequence_sums(mask.double(), sequence_of, len(bounds) - 1)[sequence_of]


@torch.no_grad()
def token_coefficients(
    mask: Tensor,
    cu_seqlens: Tensor,
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Factors that multiply the token losses before the sum.

    Args:
        mask: [T] 0/1 of any real dtype.
        cu_seqlens: [N+1] int32 or int64.
        kind: "token_mean" (DAPO, arXiv 2503.14476): 1, equal weight per token; "sequence_mean" (GRPO): 1 / (counted
            tokens of the token's sequence), equal weight per response; another registered name, or
            package.module:function.
        dtype: dtype of the result.
        options: keyword arguments of the aggregation.

    Returns:
        [T]; 0 outside the mask. Divide the sum of the products by ``loss_denominator`` of the same ``kind``.
    """
    check_mask_vector(mask)
    check_cu_seqlens(cu_seqlens, len(mask))
    coefficients = register.AGGREGATIONS.bind(kind, options)(mask=mask, cu_seqlens=cu_seqlens)
    if not isinstance(coefficients, Tensor) or coefficients.shape != mask.shape or coefficients.is_complex():
        raise ValueError(f"aggregation {kind!r}: expected one value per token, got {describe(coefficients)}")
    # Not a product: an infinite coefficient outside the mask times 0 would be NaN.
    return torch.where(mask != 0, coefficients, 0.0).to(dtype)


def loss_denominator(mask: Tensor, cu_seqlens: Tensor, kind: str, options: Mapping[str, Any] | None = None) -> float:
    """Number by which the aggregation ``kind`` divides the summed loss. Synchronizes with the GPU.

    "token_mean": the counted tokens; "sequence_mean": the sequences with at least one. Any other aggregation: its own
    denominator, or the sum of its coefficients.
    """
    denominator = register.AGGREGATIONS.find(kind).denominator
    if denominator is not None:
        check_mask_vector(mask)
        check_cu_seqlens(cu_seqlens, len(mask))
        return float(denominator(mask, cu_seqlens))
    coefficients = token_coefficients(mask, cu_seqlens, kind, dtype=torch.float64, options=options)
    return float((coefficients * mask).sum())


def counted_sequences(mask: Tensor, bounds: Tensor) -> Tensor:
    """[N] bool on the mask's device: True for sequences with at least one token in the mask [T]."""
    sequence_of = sequence_index(bounds, mask.device)
    return sequence_sums((mask != 0).double(), sequence_of, len(bounds) - 1) > 0
