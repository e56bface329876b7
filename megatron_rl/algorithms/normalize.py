"""Normalisation of advantages, and the tokens that a window's edge makes unfit for training.

Statistics are over the tokens in the mask of the tensor given: the caller hands in the whole step's batch, never a
micro-batch, so that long and short responses share one scale.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.loss import chosen
from megatron_rl.algorithms.shapes import (
    check_cu_seqlens,
    check_float_vector,
    check_mask,
    check_not_negative,
    check_per_sequence,
)

KINDS = ("none", "scale", "whiten")


@torch.no_grad()
def normalize_advantages(
    advantages: Tensor, mask: Tensor, *, kind: str, clamp: float = 0.0, eps: float = 1e-8
) -> Tensor:
    """Advantages brought to a standard deviation of 1 over the tokens in the mask.

    Args:
        advantages: [T] float32 or float64.
        mask: [T] 0/1 of any real dtype.
        kind: "none"; "scale" divides by the standard deviation, so zero stays zero and signs stay; "whiten" subtracts
            the mean first, which gives tokens without information (a window's edge) an advantage.
        clamp: bound on the size afterwards; 0 means none.
        eps: a standard deviation up to this counts as 0: there is no scale to bring to 1, nothing is divided, and
            whitening gives 0.

    Returns:
        [T]; 0 outside the mask. The standard deviation is the population's (n).
    """
    check_float_vector("advantages", advantages)
    check_mask(mask, "advantages", advantages)
    check_not_negative("clamp", clamp)
    check_not_negative("eps", eps)
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    counted = mask != 0
    inside = chosen(advantages, counted).double()
    if kind != "none" and len(inside) > 0:
        mean = inside.mean()
        deviation = (inside - mean).square().mean().sqrt()
        varies = deviation > eps
        if kind == "whiten":
            # Equal numbers may differ from their mean by a rounding: exactly 0 then.
            inside = torch.where(varies, inside - mean, 0.0)
        inside = inside / torch.where(varies, deviation, 1.0)
    if clamp > 0:
        inside = inside.clamp(-clamp, clamp)
    if len(inside) == len(advantages):
        return inside.to(advantages.dtype)
    return torch.zeros_like(advantages).masked_scatter_(counted, inside.to(advantages.dtype))


@torch.no_grad()
def boundary_mask(cu_seqlens: Tensor, finished: Tensor, n_ignore: int) -> Tensor:
    """False on the last ``n_ignore`` tokens of each unfinished sequence: they know too little of the future.

    Args:
        cu_seqlens: [N+1] int32 or int64.
        finished: [N] bool, integer or float; 0 marks a window that was cut.
        n_ignore: tokens, at least 0; 0 leaves out nothing.

    Returns:
        [T] bool on the device of ``cu_seqlens``.
    """
    bounds = check_cu_seqlens(cu_seqlens)
    check_per_sequence("finished", finished, len(bounds) - 1)
    if n_ignore != int(n_ignore) or n_ignore < 0:
        raise ValueError(f"n_ignore: expected a whole number of at least 0, got {n_ignore!r}")
    starts, ends = bounds[:-1], bounds[1:]
    cut = (finished.cpu() == 0) & (ends > starts) & (n_ignore > 0)
    # +1 where an ignored stretch starts, -1 after it; stretches of different sequences never overlap.
    steps = torch.zeros(int(bounds[-1]) + 1, dtype=torch.int8, device=cu_seqlens.device)
    firsts = torch.maximum(starts, ends - int(n_ignore))[cut].to(steps.device)
    steps.index_add_(0, firsts, torch.ones_like(firsts, dtype=torch.int8))
    steps.index_add_(0, ends[cut].to(steps.device), -torch.ones_like(firsts, dtype=torch.int8))
    return steps[:-1].cumsum(0, dtype=torch.int8) == 0
