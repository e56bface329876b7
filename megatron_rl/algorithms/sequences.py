"""Numbers per sequence of packed per-token tensors, and back; no loop over sequences.

``bounds`` is the int64 CPU tensor that ``check_cu_seqlens`` returns. Empty sequences have a sum of 0.

On the CPU a step's tokens are gone through in blocks: what is made of one on the way stays in a core's cache, where whole
copies would each be hundreds of megabytes of new memory.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

BLOCK_TOKENS = 32_000
"""Several float64 numbers of each fit into a core's cache, and torch wakes no threads for so few (but see ``exp``)."""


def sequence_index(bounds: Tensor, device: torch.device) -> Tensor:
    """[T] int64 on ``device``: the number of the sequence that each token belongs to."""
    return torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff()).to(device)


def sequence_sums(values: Tensor, sequence_of: Tensor, num_sequences: int) -> Tensor:
    """[N] sums of ``values`` [T] over each sequence."""
    return values.new_zeros(num_sequences).index_add(0, sequence_of, values)


def exact_sums(values: Tensor, bounds: Tensor) -> Tensor:
    """[N] float64 sums of ``values`` [T] over each sequence; no gradient."""
    if values.device.type != "cpu":
        return sequence_sums(values.double(), sequence_index(bounds, values.device), len(bounds) - 1)
    sums, borders = np.zeros(len(bounds) - 1), bounds.numpy()
    for first, end in sequence_blocks(bounds, values.device):
        starts = borders[first : end + 1]
        filled = starts[1:] > starts[:-1]
        if filled.any():
            numbers = values[starts[0] : starts[-1]].detach().double().numpy()
            sums[first:end][filled] = np.add.reduceat(numbers, (starts[:-1] - starts[0])[filled])
    return torch.from_numpy(sums)


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """[T] ``values`` [N], each ``lengths`` [N] times."""
    if values.device.type != "cpu":
        return values.repeat_interleave(lengths.to(values.device))
    return torch.from_numpy(np.repeat(values.numpy(), lengths.numpy()))


def exp(values: Tensor) -> Tensor:
    """e to the power of ``values``; no gradient.

    Not torch's on the CPU: it wakes threads for two thousand numbers, which takes many times longer than a block of them.
    """
    return values.exp() if values.device.type != "cpu" else torch.from_numpy(np.exp(values.numpy()))


def expm1(values: Tensor) -> Tensor:
    """``exp`` less 1, as precise near 0 as elsewhere."""
    return values.expm1() if values.device.type != "cpu" else torch.from_numpy(np.expm1(values.numpy()))


def num_on(mask: Tensor) -> int:
    """How many entries of ``mask`` are not 0. Waits for the device."""
    return int(np.count_nonzero(mask.numpy()) if mask.device.type == "cpu" else mask.count_nonzero())


def token_blocks(values: Tensor) -> Iterator[slice]:
    """Ranges of tokens that are gone through one after the other; on a GPU all at once."""
    size = BLOCK_TOKENS if values.device.type == "cpu" else max(len(values), 1)
    return (slice(start, start + size) for start in range(0, len(values), size))


def sequence_blocks(bounds: Tensor, device: torch.device) -> list[tuple[int, int]]:
    """Ranges of whole sequences with at most ``BLOCK_TOKENS`` tokens, or one longer sequence; on a GPU all at once."""
    cuts, starts = [0], bounds.numpy()
    if starts[-1] <= BLOCK_TOKENS or device.type != "cpu":
        return [(0, len(starts) - 1)]
    while cuts[-1] < len(starts) - 1:
        end = int(np.searchsorted(starts, starts[cuts[-1]] + BLOCK_TOKENS, side="right")) - 1
        cuts.append(max(end, cuts[-1] + 1))
    return list(itertools.pairwise(cuts))


def new_like(values: Tensor, dtype: torch.dtype) -> Tensor:
    """An unfilled tensor of the length of ``values`` [T]; on the CPU of numpy, which asks for large pages."""
    if values.device.type != "cpu":
        return torch.empty(len(values), dtype=dtype, device=values.device)
    return torch.from_numpy(np.empty(len(values), torch.empty(0, dtype=dtype).numpy().dtype))
