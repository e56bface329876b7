"""Numbers per sequence of packed per-token tensors, and back; no loop over sequences.

``bounds`` is the int64 CPU tensor that ``check_cu_seqlens`` returns. Empty sequences have a sum of 0.
"""

import torch
from torch import Tensor


def sequence_index(bounds: Tensor, device: torch.device) -> Tensor:
    """[T] int64 on ``device``: the number of the sequence that each token belongs to."""
    return torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff()).to(device)


def sequence_sums(values: Tensor, sequence_of: Tensor, num_sequences: int) -> Tensor:
    """[N] sums of ``values`` [T] over each sequence."""
    return values.new_zeros(num_sequences).index_add(0, sequence_of, values)
