"""Normalizes advantages, also by role of a dialogue, and masks a window's last tokens, whose advantages are unreliable.

Statistics are over the tokens in the mask of the given tensor. The caller passes the whole step's batch, never a
micro-batch, so that long and short responses share one scale.

The turns of a dialogue need no other treatment than ``role_normalize`` (PAG, arXiv 2506.10406): with ``cu_seqlens`` cut at
the turns' borders, each turn is its own sequence for GAE, EGAE and returns, the preceding dialogue is its prompt, and no
reward of a later turn enters an earlier turn.
"""

import math

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.cpu_loops import array, moments, run, write_scaled
from megatron_rl.algorithms.loss import mask_to_bool
from megatron_rl.algorithms.sequences import repeat_per_sequence
from megatron_rl.algorithms.shapes import (
    INDEX_DTYPES,
    check_cu_seqlens,
    check_float_vector,
    check_mask,
    check_not_negative,
    check_per_sequence,
    describe,
)

KINDS = ("none", "scale", "whiten")


@torch.no_grad()
def normalize_advantages(
    advantages: Tensor, mask: Tensor, *, kind: str, clamp: float = 0.0, eps: float = 1e-8
) -> Tensor:
    """Advantages scaled to a standard deviation of 1 over the tokens in the mask.

    Args:
        advantages: [T] float32 or float64.
        mask: [T] 0/1 of any real dtype.
        kind: "none"; "scale" divides by the standard deviation, so zero stays zero and signs stay; "whiten" subtracts
            the mean first, which gives tokens without information (a window's edge) an advantage.
        clamp: bound on the absolute value afterwards; 0 means none.
        eps: a standard deviation of at most eps counts as 0: nothing is divided, and whitening returns 0.

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
    if kind == "whiten" and not varies:
        # Equal values may differ from their mean by a rounding error, and the result must be exactly 0.
        return torch.zeros_like(advantages)
    values, inside = array(advantages), array(mask_to_bool(mask))
    result = np.empty_like(values)
    center, divisor = mean if kind == "whiten" else 0.0, deviation if varies else 1.0
    run(write_scaled, values, inside, float(center), float(divisor), float(clamp or math.inf), result)
    return torch.from_numpy(result).to(advantages.device)


def mean_and_deviation(values: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and population (n) standard deviation of ``values`` [T] in the mask; zeros if the mask is empty."""
    count, mean, squares = run(moments, array(values), array(mask_to_bool(mask)))
    return mean, math.sqrt(squares / max(count, 1))


@torch.no_grad()
def boundary_mask(cu_seqlens: Tensor, finished: Tensor, n_ignore: int) -> Tensor:
    """False on the last ``n_ignore`` tokens of each unfinished sequence, whose advantages cover too little of the future.

    Args:
        cu_seqlens: [N+1] int32 or int64.
        finished: [N] bool, integer or float; 0 marks an unfinished response.
        n_ignore: tokens, at least 0; 0 masks nothing.

    Returns:
        [T] bool on the device of ``cu_seqlens``.
    """
    bounds = check_cu_seqlens(cu_seqlens)
    check_per_sequence("finished", finished, len(bounds) - 1)
    if n_ignore != int(n_ignore) or n_ignore < 0:
        raise ValueError(f"n_ignore: expected a whole number of at least 0, got {n_ignore!r}")
    starts, ends = bounds[:-1], bounds[1:]
    ignored = (ends - starts).clamp(max=int(n_ignore)) * (finished.cpu() == 0)
    # Two spans per sequence: the tokens that count, then the ignored ones.
    lengths = torch.stack([ends - starts - ignored, ignored], dim=1).flatten()
    return repeat_per_sequence(torch.tensor([True, False]).repeat(len(starts)), lengths).to(cu_seqlens.device)


@torch.no_grad()
def role_normalize(advantages: Tensor, mask: Tensor, roles: Tensor, eps: float = 1e-8, *, clamp: float = 0.0) -> Tensor:
    """Whiten the advantages of each role separately, so that the easier role does not set the scale (RoleAdvNorm, PAG).

    Args:
        advantages: [T] float32 or float64, of the whole step's batch, never a micro-batch.
        mask: [T] 0/1 of any real dtype.
        roles: [T] int32 or int64: id of the token's role; any ids, read inside the mask only.
        eps: a standard deviation of at most eps counts as 0: the role has no signal and gets exactly 0.
        clamp: bound on the absolute value afterwards; 0 means none.

    Returns:
        [T]: mean 0 and (population) standard deviation 1 within each role; 0 outside the mask.
    """
    check_float_vector("advantages", advantages)
    check_mask(mask, "advantages", advantages)
    if (
        not isinstance(roles, Tensor)
        or roles.shape != advantages.shape
        or roles.device != advantages.device
        or roles.dtype not in INDEX_DTYPES
    ):
        raise ValueError(
            f"roles: expected an int32 or int64 tensor of shape {list(advantages.shape)} on {advantages.device}, "
            f"got {describe(roles)}"
        )
    normalized = torch.zeros_like(advantages)
    # unique_consecutive first: a turn is many tokens of one role, and sorting all of them would dominate the time.
    for role in roles.unique_consecutive().unique():
        role_mask = (mask != 0) & (roles == role)
        normalized += normalize_advantages(advantages, role_mask, kind="whiten", clamp=clamp, eps=eps)
    return normalized
