"""Reduces packed per-token tensors to values per sequence, and repeats these per token.

``bounds`` is the int64 CPU tensor that ``check_cu_seqlens`` returns. Empty sequences have a sum of 0.

On the CPU a step's tokens are processed by compiled loops (``cpu_loops``) or in blocks. A block's intermediate arrays
fit into a core's cache, whereas intermediate arrays of a whole step would each take hundreds of megabytes.
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.cpu_loops import array, run, sums_by_sequence

BLOCK_TOKENS = 32_000
"""Tokens per block: several float64 arrays of this length fit into a core's cache, and torch starts no threads for them
(except in ``exp``)."""

_WORD = 8
"""Bytes per word when a bool mask is viewed as uint64."""
_ALL_ON = np.uint64(0x0101010101010101)
"""Value of such a word if all of its bytes are True."""


def sequence_index(bounds: Tensor, device: torch.device) -> Tensor:
    """[T] int64 on ``device``: index of each token's sequence, from ``bounds`` [N+1] on the CPU."""
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
    """[N] int64 on the CPU: number of entries of ``mask`` [T] other than 0, per sequence."""
    flags, borders = array(mask), bounds.tolist()
    return torch.tensor([np.count_nonzero(flags[start:end]) for start, end in itertools.pairwise(borders)], dtype=torch.int64)


def repeat_per_sequence(values: Tensor, lengths: Tensor) -> Tensor:
    """[T]: each of ``values`` [N] repeated ``lengths`` [N] times."""
    if values.device.type != "cpu":
        return values.repeat_interleave(lengths.to(values.device))
    return torch.from_numpy(np.repeat(values.numpy(), lengths.numpy()))


def exp(values: Tensor) -> Tensor:
    """Exponential of ``values``, without gradient.

    Computed by numpy on the CPU, because torch starts threads from two thousand values on, and starting them takes much
    longer than computing a block.
    """
    return values.exp() if values.device.type != "cpu" else torch.from_numpy(np.exp(values.numpy()))


def expm1(values: Tensor) -> Tensor:
    """``exp(values) - 1``, precise also near 0, without gradient."""
    return values.expm1() if values.device.type != "cpu" else torch.from_numpy(np.expm1(values.numpy()))


def count_nonzero(mask: Tensor) -> int:
    """Number of entries of ``mask`` other than 0. Synchronizes with the GPU."""
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
    """[2 R] int64: first index and end of each span of True in ``flags`` [T] bool."""
    candidates = _edge_candidates(flags)
    edges = candidates[flags[candidates] != np.where(candidates > 0, flags[candidates - 1], False)]
    return np.append(edges, len(flags)) if len(edges) % 2 else edges


def _edge_candidates(flags: np.ndarray) -> np.ndarray:
    """[K] int64, ascending: indices in ``flags`` [T] bool that include every entry different from its predecessor."""
    whole = len(flags) // _WORD * _WORD
    words = np.ascontiguousarray(flags[:whole]).view(np.uint64)
    # A word equal to its predecessor contains no edge, unless both words mix True and False.
    new = np.flatnonzero(np.concatenate([np.ones(min(len(words), 1), bool), words[1:] != words[:-1]]))
    is_mixed = (words[new] != 0) & (words[new] != _ALL_ON)
    if (is_mixed & (np.diff(new, append=len(words)) > 1)).any():
        return np.arange(len(flags))
    return np.concatenate([(new[:, None] * _WORD + np.arange(_WORD)).ravel(), np.arange(whole, len(flags))])
