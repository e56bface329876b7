"""Indices of sequences' tokens in the per-token tensors of a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.data.batch import PackedBatch


def token_indices(batch: PackedBatch, sequences: Sequence[int]) -> Tensor:
    """[tokens of ``sequences``] int64: positions in the batch's per-token tensors, in the order of ``sequences``."""
    borders = batch.cu_seqlens.tolist()
    ranges = [torch.arange(borders[index], borders[index + 1]) for index in sequences]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *ranges])
