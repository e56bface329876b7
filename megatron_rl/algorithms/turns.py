"""Normalizes the advantages of multi-turn dialogues by role (PAG, arXiv 2506.10406).

Turns need no other treatment: with ``cu_seqlens`` cut at the turns' borders, each turn is its own sequence for GAE,
EGAE and returns, the preceding dialogue is its prompt, and no reward of a later turn enters an earlier one.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.normalize import normalize_advantages
from megatron_rl.algorithms.shapes import INDEX_DTYPES, check_float_vector, check_mask, describe


@torch.no_grad()
def role_normalize(advantages: Tensor, mask: Tensor, roles: Tensor, eps: float = 1e-8, *, clamp: float = 0.0) -> Tensor:
    """Whiten the advantages of each role separately, so that the easier role does not set the scale (RoleAdvNorm).

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
