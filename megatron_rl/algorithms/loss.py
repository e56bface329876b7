"""The result type of every loss function, and the masked sums that losses are computed from.

Invariants: a loss is a sum and a denominator, never a mean. Sums and denominators are added over micro-batches and
ranks, then divided once, so gradients do not depend on how tokens were split. Values outside the mask are replaced
before any arithmetic, so that an inf or NaN there reaches neither the loss nor the gradient.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.algorithms.shapes import check_factor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +- this bound: beyond exp(20) = 5e8 two policies have nothing in common and sums overflow."""


@dataclass(frozen=True)
class Loss:
    sum: Tensor
    """[] with gradient: the loss summed over the tokens in the mask."""
    denominator: Tensor
    """[] without gradient: the divisor of the sum, applied after the global reduction; 0 for an empty mask."""
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name -> (sum, denominator), both [] without gradient; reduced by addition like the loss."""


def keep(value: Tensor, mask: Tensor, filler: float = 0.0) -> Tensor:
    """[T] ``value`` where the mask is not 0, ``filler`` (and no gradient) elsewhere."""
    return torch.where(mask_to_bool(mask), value, filler)


def mask_to_bool(mask: Tensor) -> Tensor:
    """``mask`` as [T] bool: True for entries other than 0."""
    return mask if mask.dtype is torch.bool else mask != 0


def masked_sum(value: Tensor, mask: Tensor) -> Tensor:
    """[] sum of ``value`` [T] weighted by the mask: 1 counts, 0 is never read."""
    return (keep(value, mask) * mask).sum()


def mask_total(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[] number of tokens in the mask."""
    return mask.to(dtype).sum()


def weighted_sum(
    token_loss: Tensor, mask: Tensor, weights: Tensor | None = None, coefficients: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum [] and denominator [] of ``token_loss`` [T].

    ``weights`` and ``coefficients`` [T] are constants that multiply the tokens' losses and are not read outside the
    mask. The denominator is the sum of the coefficients, regardless of the weights.
    """
    denominator = mask_total(mask, token_loss.dtype)
    if weights is not None:
        token_loss = token_loss * keep(check_factor("weights", weights, "the loss", token_loss), mask)
    if coefficients is not None:
        coefficients = keep(check_factor("coefficients", coefficients, "the loss", token_loss), mask)
        token_loss = token_loss * coefficients
        denominator = masked_sum(coefficients, mask)
    return masked_sum(token_loss, mask), denominator
