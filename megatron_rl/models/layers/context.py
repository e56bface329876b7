"""Context parallelism: the tokens of every sequence are split over the ranks of a group; each rank attends to all tokens.

The split is Megatron's zigzag: a sequence, padded to a multiple of 2 * ranks, is cut into 2 * ranks parts. Rank r
has part r and part 2 * ranks - 1 - r, so that all ranks have the same work under a causal mask. A pack is split
sequence by sequence; padding follows each sequence, where the mask excludes it from every real token's result.

Invariants: every token is on exactly one rank. Per-token results of the last stage are summed to whole sequences on
every rank (``sum_over_context``), so that losses do not depend on the split. Each rank then has the gradient of its
own tokens only; the sum over the group, computed by Megatron's gradient reduction, is the full gradient.
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

NOWHERE = -1
"""Entry of an index for padding, or for a token of another rank."""
_FP8_ALIGNMENT = 16
"""The number of rows of Transformer Engine's 8-bit products must be a multiple of this."""


@dataclass(frozen=True)
class PackSplit:
    """One rank's part of a pack of T tokens: L rows, the same number on every rank."""

    lengths: tuple[int, ...]
    """Padded lengths of all sequences, plus a sequence of padding if the total needs it; their sum is L * ranks."""
    token_of_row: Tensor
    """[L] int64: the pack's token in each of this rank's rows, NOWHERE for padding."""
    row_of_token: Tensor
    """[T] int64: this rank's row of each of the pack's tokens, NOWHERE for tokens of other ranks."""


def pack_alignment(config: TransformerConfig) -> int:
    """Number of tokens of which a pack's padded length must be a multiple, for the layers of each rank."""
    tp_size = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return tp_size * (_FP8_ALIGNMENT if config.fp8 else 1)


@functools.lru_cache(maxsize=64)
def split_pack(lengths: tuple[int, ...], num_ranks: int, rank: int, multiple: int = 1) -> PackSplit:
    """The part of ``rank`` out of ``num_ranks``, with L a multiple of ``multiple``; tensors are on the CPU."""
    unit = 2 * num_ranks
    padded = [-(-length // unit) * unit for length in lengths]
    # The final padding is a separate sequence, a multiple of 2 * ranks like the others.
    padding = -sum(padded) % (unit * multiple)
    padded += [padding] if padding else []
    tokens = []
    start = 0
    for length, padded_length in zip([*lengths, 0], padded, strict=False):
        if padded_length == 0:
            continue
        positions = zigzag(padded_length, num_ranks, rank)
        tokens.append(torch.where(positions < length, positions + start, NOWHERE))
        start += length
    token_of_row = torch.cat(tokens)
    row_of_token = torch.full((start,), NOWHERE)
    real = token_of_row >= 0
    row_of_token[token_of_row[real]] = real.nonzero()[:, 0]
    return PackSplit(tuple(padded), token_of_row, row_of_token)


def zigzag(length: int, num_ranks: int, rank: int) -> Tensor:
    """[length / num_ranks] int64: the positions of a sequence on ``rank``, ascending."""
    parts = torch.arange(length).view(2 * num_ranks, -1)
    return torch.cat([parts[rank], parts[2 * num_ranks - 1 - rank]])


def rows_of_tokens(lengths: Sequence[int], config: TransformerConfig) -> Tensor | None:
    """[T] this rank's row of each token (``PackSplit.row_of_token``), or None without context parallelism."""
    return split_here(tuple(lengths), config).row_of_token if config.context_parallel_size > 1 else None


def split_here(lengths: tuple[int, ...], config: TransformerConfig) -> PackSplit:
    """This context-parallel rank's rows of a packed batch whose sequences have ``lengths`` tokens."""
    rank = parallel_state.get_context_parallel_rank()
    return split_pack(lengths, config.context_parallel_size, rank, pack_alignment(config))


def num_rows(lengths: Sequence[int], config: TransformerConfig) -> int:
    """Number of rows of hidden states that each rank has for a pack and sends to the next pipeline stage."""
    rows = len(split_here(tuple(lengths), config).token_of_row) if config.context_parallel_size > 1 else sum(lengths)
    rows += -rows % pack_alignment(config)
    return rows // config.tensor_model_parallel_size if config.sequence_parallel else rows


def sum_over_context(values: Tensor, config: TransformerConfig) -> Tensor:
    """Sum of ``values`` over the context-parallel ranks; each rank passes zeros for the other ranks' tokens.

    Each rank gets the whole result, and the gradient of its own summand.
    """
    if config.context_parallel_size == 1:
        return values
    return _Sum.apply(values, parallel_state.get_context_parallel_group())


class _Sum(torch.autograd.Function):
    """All-reduce sum whose backward is the identity, because all ranks compute the same loss from the same result."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
