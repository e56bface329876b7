"""How token losses become one number: by tokens, or by responses first.

Laws: the coefficients of the counted tokens sum to the denominator; both are those of the sequences given, so
denominators add over micro-batches and ranks as long as no sequence is split.
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
    """Every token counts the same, so long responses count more (DAPO, arXiv 2503.14476)."""
    return torch.ones_like(mask, dtype=torch.float64)


def _num_counted_sequences(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return counted_sequences(mask, check_cu_seqlens(cu_seqlens, len(mask))).sum()


@register.aggregation("sequence_mean", denominator=_num_counted_sequences)
def _sequence_mean(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over a response's tokens first, then over responses (GRPO, arXiv 2402.03300)."""
    bounds = check_cu_seqlens(cu_seqlens, len(mask))
    sequence_of = sequence_index(bounds, mask.device)
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
    """What each token's loss is multiplied by before the sum.

    Args:
        mask: [T] 0/1 of any real dtype.
        cu_seqlens: [N+1] int32 or int64.
        kind: "token_mean" (DAPO, arXiv 2503.14476): 1, every token counts alike; "sequence_mean" (GRPO): 1 / (counted
            tokens of the own sequence), every response counts alike; another registered name, or
            package.module:function.
        dtype: of the result.
        options: of the aggregation.

    Returns:
        [T]; 0 outside the mask. Divide the sum of the products by ``loss_denominator`` of the same ``kind``.
    """
    check_mask_vector(mask)
    check_cu_seqlens(cu_seqlens, len(mask))
    coefficients = register.AGGREGATIONS.bind(kind, options)(mask=mask, cu_seqlens=cu_seqlens)
    if not isinstance(coefficients, Tensor) or coefficients.shape != mask.shape or coefficients.is_complex():
        raise ValueError(f"aggregation {kind!r}: expected a number for each token, got {describe(coefficients)}")
    return torch.where(mask != 0, coefficients, 0.0).to(dtype)


def loss_denominator(mask: Tensor, cu_seqlens: Tensor, kind: str, options: Mapping[str, Any] | None = None) -> float:
    """Counted tokens ("token_mean"), sequences with at least one ("sequence_mean"), or what another aggregation says:
    its own denominator, or the sum of its coefficients. Waits for the device.
    """
    denominator = register.AGGREGATIONS.find(kind).denominator
    if denominator is not None:
        check_mask_vector(mask)
        check_cu_seqlens(cu_seqlens, len(mask))
        return float(denominator(mask, cu_seqlens))
    coefficients = token_coefficients(mask, cu_seqlens, kind, dtype=torch.float64, options=options)
    return float((coefficients * mask).sum())


def counted_sequences(mask: Tensor, bounds: Tensor) -> Tensor:
    """[N] bool on the mask's device: which sequences hold a token of the mask [T]."""
    sequence_of = sequence_index(bounds, mask.device)
    return sequence_sums((mask != 0).double(), sequence_of, len(bounds) - 1) > 0
