"""Context parallelism: the ranks of a group share the tokens of every sequence, and each attends to all of them.

The split is Megatron's zigzag: a sequence, padded to a multiple of 2 * ranks, is cut into 2 * ranks parts, and rank r
holds part r and part 2 * ranks - 1 - r, so that under a causal mask all ranks have the same work. A pack is split
sequence by sequence; padding sits at the end of each, where the mask keeps it out of every real token's result.

Invariants: every token is on exactly one rank; what the last stage computes token by token is put together on every
rank (``gather_tokens``), so that losses see whole sequences and know nothing of this; each rank then carries the
gradient of its own tokens only, and the sum over the group, which Megatron's gradient reduction makes, is the whole.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.models.layers.precision import pack_alignment

NOWHERE = -1
"""In an index: padding, or a token that another rank holds."""


@dataclass(frozen=True)
class PackSplit:
    """What one rank holds of a pack of T tokens: L rows, the same number on every rank."""

    lengths: tuple[int, ...]
    """Padded lengths of all sequences, one more at the end where the total needs it; their sum is L * ranks."""
    token_of_row: Tensor
    """[L] int64: the pack's token in each of this rank's rows, NOWHERE for padding."""
    row_of_token: Tensor
    """[T] int64: this rank's row of each of the pack's tokens, NOWHERE where another rank holds it."""


@functools.lru_cache(maxsize=64)
def split_pack(lengths: tuple[int, ...], num_ranks: int, rank: int, multiple: int = 1) -> PackSplit:
    """The rows of ``rank`` of ``num_ranks``, L a multiple of ``multiple``; on the CPU."""
    unit = 2 * num_ranks
    padded = [-(-length // unit) * unit for length in lengths]
    # The fill-up is a sequence of its own, a multiple of 2 * ranks like the others.
    rest = -sum(padded) % (unit * multiple)
    padded += [rest] if rest else []
    tokens = []
    start = 0
    for length, padded_length in zip([*lengths, 0], padded, strict=False):
        if padded_length == 0:
            continue
        places = zigzag(padded_length, num_ranks, rank)
        tokens.append(torch.where(places < length, places + start, NOWHERE))
        start += length
    token_of_row = torch.cat(tokens)
    row_of_token = torch.full((start,), NOWHERE)
    real = token_of_row >= 0
    row_of_token[token_of_row[real]] = real.nonzero()[:, 0]
    return PackSplit(tuple(padded), token_of_row, row_of_token)


def zigzag(length: int, num_ranks: int, rank: int) -> Tensor:
    """[length / num_ranks] int64: the positions of a sequence that ``rank`` holds, ascending."""
    parts = torch.arange(length).view(2 * num_ranks, -1)
    return torch.cat([parts[rank], parts[2 * num_ranks - 1 - rank]])


def rows_of_tokens(lengths: Sequence[int], config: TransformerConfig, device: torch.device) -> Tensor | None:
    """[T] this rank's row of each token (``PackSplit.row_of_token``); None without context parallelism: all in place."""
    if config.context_parallel_size == 1:
        return None
    return split_here(tuple(lengths), config).row_of_token.to(device)


def split_here(lengths: tuple[int, ...], config: TransformerConfig) -> PackSplit:
    """This rank's part of a pack."""
    rank = parallel_state.get_context_parallel_rank()
    return split_pack(lengths, config.context_parallel_size, rank, pack_alignment(config))


def num_rows(lengths: Sequence[int], config: TransformerConfig) -> int:
    """How many rows of hidden states each rank has of a pack, and hands to the next pipeline stage."""
    rows = len(split_here(tuple(lengths), config).token_of_row) if config.context_parallel_size > 1 else sum(lengths)
    rows += -rows % pack_alignment(config)
    return rows // config.tensor_model_parallel_size if config.sequence_parallel else rows


def sum_over_context(values: Tensor, config: TransformerConfig) -> Tensor:
    """``values``, zero where another rank has the number, whole on every rank; the gradient stays on each rank."""
    if config.context_parallel_size == 1:
        return values
    return _Sum.apply(values, parallel_state.get_context_parallel_group())


class _Sum(torch.autograd.Function):
    """The sum over the ranks; every rank goes on with the same result, so its gradient is each rank's own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
