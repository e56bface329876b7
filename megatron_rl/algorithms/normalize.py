"""Normalisation of advantages, and the tokens that a window's edge makes unfit for training.

Statistics are over the tokens in the mask of the tensor given: the caller hands in the whole step's batch, never a
micro-batch, so that long and short responses share one scale.
"""

import math

import torch
from torch import Tensor

from megatron_rl.algorithms.loss import exactly, keep
from megatron_rl.algorithms.sequences import new_like, num_on, spread, token_blocks
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
    mean, deviation = (0.0, 0.0) if kind == "none" else mean_and_deviation(advantages, mask)
    varies = deviation > eps
    result = new_like(advantages, advantages.dtype)
    for block in token_blocks(advantages):
        inside = advantages[block].to(torch.float64, copy=True)
        if kind == "whiten":
            # Equal numbers may differ from their mean by a rounding: exactly 0 then.
            inside = inside.sub_(mean) if varies else inside.zero_()
        if varies:
            inside /= deviation
        if clamp > 0:
            inside.clamp_(-clamp, clamp)
        result[block] = inside if num_on(mask[block]) == len(inside) else keep(inside, mask[block])
    return result


def mean_and_deviation(values: Tensor, mask: Tensor) -> tuple[float, float]:
    """Of ``values`` [T] in the mask; the population's (n) standard deviation. Zeros where the mask is empty."""
    number, mean, squares = 0, 0.0, 0.0
    for block in token_blocks(values):
        count = num_on(mask[block])
        if not count:
            continue
        inside = exactly(values[block], mask[block])
        of_block = float(inside.sum()) / count
        distances = inside.sub_(of_block) if count == len(inside) else keep(inside - of_block, mask[block])
        # Two parts as one: Chan, Golub and LeVeque, "Updating formulae", 1979.
        apart, number = of_block - mean, number + count
        squares += float(distances.square_().sum()) + apart * apart * count * (number - count) / number
        mean += apart * count / number
    return mean, math.sqrt(squares / max(number, 1))


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
    ignored = (ends - starts).clamp(max=int(n_ignore)) * (finished.cpu() == 0)
    # Of each sequence what counts, and what does not.
    lengths = torch.stack([ends - starts - ignored, ignored], dim=1).flatten()
    return spread(torch.tensor([True, False]).repeat(len(starts)), lengths).to(cu_seqlens.device)
