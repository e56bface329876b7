"""What every loss function returns, and the masked sums they are made of.

Invariants: a loss is a sum and a denominator, never a mean: sums and denominators are added over micro-batches and
ranks, then divided once, so gradients do not depend on how tokens were split. What the mask leaves out is replaced
before any arithmetic, so that an inf or NaN there reaches neither the loss nor the gradient.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    sum: Tensor
    """[] with gradient: the loss summed over the tokens in the mask."""
    denominator: Tensor
    """[] without gradient: what the sum is to be divided by after the global reduction; 0 for an empty mask."""
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name -> (sum, denominator), both [] without gradient; reduced by addition like the loss."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [] without gradient; reduced by maximum."""


def keep(value: Tensor, mask: Tensor, filler: float = 0.0) -> Tensor:
    """[T] ``value`` where the mask is not 0, ``filler`` (and no gradient) elsewhere."""
    return torch.where(mask != 0, value, filler)


def masked_sum(value: Tensor, mask: Tensor) -> Tensor:
    """[] sum of ``value`` [T] weighted by the mask: 1 counts, 0 is never read."""
    return (keep(value, mask) * mask).sum()


def mask_total(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[] how many tokens the mask holds."""
    return mask.to(dtype).sum()
