"""How token losses become one number: by tokens, or by responses first.

Laws: the coefficients of the counted tokens sum to the denominator; both are those of the sequences given, so
denominators add over micro-batches and ranks as long as no sequence is split.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
from megatron_rl.algorithms.shapes import check_choice, check_cu_seqlens, check_mask_vector

_AGGREGATIONS = ("token_mean", "sequence_mean")


@torch.no_grad()
def token_coefficients(mask: Tensor, cu_seqlens: Tensor, kind: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """What each token's loss is multiplied by before the sum.

    Args:
        mask: [T] 0/1 of any real dtype.
        cu_seqlens: [N+1] int32 or int64.
        kind: "token_mean" (DAPO, arXiv 2503.14476): 1, every token counts alike; "sequence_mean" (GRPO): 1 / (counted
            tokens of the own sequence), every response counts alike.
        dtype: of the result.

    Returns:
        [T]; 0 outside the mask. Divide the sum of the products by ``loss_denominator`` of the same ``kind``.
    """
    bounds = _checked(mask, cu_seqlens, kind)
    if kind == "token_mean":
        return (mask != 0).to(dtype)
    sequence_of = sequence_index(bounds, mask.device)
    counts = sequence_sums(mask.double(), sequence_of, len(bounds) - 1)[sequence_of]
    return torch.where(mask != 0, 1.0 / counts, 0.0).to(dtype)


def loss_denominator(mask: Tensor, cu_seqlens: Tensor, kind: str) -> float:
    """Counted tokens ("token_mean"), or sequences with at least one ("sequence_mean"). Waits for the device."""
    bounds = _checked(mask, cu_seqlens, kind)
    if kind == "token_mean":
        return float(mask.double().sum())
    return float(counted_sequences(mask, bounds).sum())


def counted_sequences(mask: Tensor, bounds: Tensor) -> Tensor:
    """[N] bool on the mask's device: which sequences hold a token of the mask [T]."""
    sequence_of = sequence_index(bounds, mask.device)
    return sequence_sums((mask != 0).double(), sequence_of, len(bounds) - 1) > 0


def _checked(mask: Tensor, cu_seqlens: Tensor, kind: str) -> Tensor:
    check_mask_vector(mask)
    check_choice("kind", kind, _AGGREGATIONS)
    return check_cu_seqlens(cu_seqlens, len(mask))
