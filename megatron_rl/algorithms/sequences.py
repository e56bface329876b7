"""Numbers per sequence of packed per-token tensors, and back; no loop over sequences.

``bounds`` is the int64 CPU tensor that ``check_cu_seqlens`` returns. Empty sequences have a sum of 0.

On the CPU a step's tokens are gone through in compiled loops (``token_sums``), or in blocks: what is made of one on the way stays
in a core's cache, where whole copies would each be hundreds of megabytes of new memory.
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.token_sums import array, run, sums_by_sequence

BLOCK_TOKENS = 32_000
"""Several float64 numbers of each fit into a core's cache, and torch wakes no threads for so few (but see ``exp``)."""

_WORD = 8
_ALL_ON = np.uint64(0x0101010101010101)
"""A word of a mask of bytes, and what it is where all of them are on."""


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
    sums = np.empty(len(bounds) - 1)
    run(sums_by_sequence, array(values), array(bounds), sums)
    return torch.from_numpy(sums)


def counts_by_sequence(mask: Tensor, bounds: Tensor) -> Tensor:
    """[N] int64 on the CPU: entries of ``mask`` [T] that are not 0, in each sequence."""
    flags, borders = array(mask), bounds.tolist()
    return torch.tensor([np.count_nonzero(flags[start:end]) for start, end in itertools.pairwise(borders)], dtype=torch.int64)


def repeat_per_sequence(values: Tensor, lengths: Tensor) -> Tensor:
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


def count_nonzero(mask: Tensor) -> int:
    """How many entries of ``mask`` are not 0. Waits for the device."""
    return int(np.count_nonzero(mask.numpy()) if mask.device.type == "cpu" else mask.count_nonzero())


def sequence_blocks(bounds: Tensor) -> list[tuple[int, int]]:
    """Ranges of whole sequences with at most ``BLOCK_TOKENS`` tokens, or one longer sequence."""
    cuts, starts = [0], bounds.numpy()
    if starts[-1] <= BLOCK_TOKENS:
        return [(0, len(starts) - 1)]
    while cuts[-1] < len(starts) - 1:
        end = int(np.searchsorted(starts, starts[cuts[-1]] + BLOCK_TOKENS, side="right")) - 1
        cuts.append(max(end, cuts[-1] + 1))
    return list(itertools.pairwise(cuts))


def edges(flags: np.ndarray) -> np.ndarray:
    """[2 R] int64: first place and end of each run of True in ``flags`` [T] bool."""
    places = _places_of_edges(flags)
    edges = places[flags[places] != np.where(places > 0, flags[places - 1], False)]
    return np.append(edges, len(flags)) if len(edges) % 2 else edges


def _places_of_edges(flags: np.ndarray) -> np.ndarray:
    """[K] int64, ascending: places of ``flags`` [T] bool, among them all that differ from the one before."""
    whole = len(flags) // _WORD * _WORD
    words = np.ascontiguousarray(flags[:whole]).view(np.uint64)
    # A word like the one before it has no edge, unless both are on and off inside.
    new = np.flatnonzero(np.concatenate([np.ones(min(len(words), 1), bool), words[1:] != words[:-1]]))
    is_mixed = (words[new] != 0) & (words[new] != _ALL_ON)
    if (is_mixed & (np.diff(new, append=len(words)) > 1)).any():
        return np.arange(len(flags))
    return np.concatenate([(new[:, None] * _WORD + np.arange(_WORD)).ravel(), np.arange(whole, len(flags))])
