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
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.models.layers import PackedAttention
from megatron_rl.models.precision import pack_alignment

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


def sum_over_context(values: Tensor, config: TransformerConfig) -> Tensor:
    """``values``, zero where another rank has the number, whole on every rank; the gradient stays on each rank."""
    if config.context_parallel_size == 1:
        return values
    return _Sum.apply(values, parallel_state.get_context_parallel_group())


class ContextAttention(PackedAttention):
    """Causal attention of this rank's queries to all keys and values of a pack, which are gathered over the group.

    For machines without Transformer Engine: simple rather than fast, the mask of a bucket is a tensor.
    """

    is_context_parallel = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: "ContextSeqParams | None" = None,
    ) -> Tensor:
        """query [L, heads, d], key [L, groups, d], value [L, groups, e] -> [L, heads * e]."""
        if packed_seq_params is None or packed_seq_params.plan is None:
            raise ValueError(
                "ContextAttention needs ContextSeqParams with a plan: call the model through models.packed"
            )
        group, plan = parallel_state.get_context_parallel_group(), packed_seq_params.plan
        keys, values = (_GatherRows.apply(t, group).index_select(0, plan.key_rows) for t in (key, value))
        queries = query.index_select(0, plan.query_rows)
        attended = []
        query_sizes = [n * longest // group.size() for n, longest in plan.shapes]
        key_sizes = [n * longest for n, longest in plan.shapes]
        parts = zip(queries.split(query_sizes), keys.split(key_sizes), values.split(key_sizes), strict=True)
        for (n, _), positions, (q, k, v) in zip(plan.shapes, plan.positions, parts, strict=True):
            q, k, v = (part.unflatten(0, (n, -1)).transpose(1, 2) for part in (q, k, v))
            mask = positions[:, None] >= torch.arange(k.shape[2], device=k.device)
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            attended.append(context.transpose(1, 2).flatten(0, 1))
        return torch.cat(attended).index_select(0, plan.unsort).flatten(1)


@dataclass(frozen=True)
class ContextPlan:
    """Attention calls of one rank: sequences of the same padded length share one, so nothing is padded twice."""

    shapes: list[tuple[int, int]]
    """(sequences, padded length) of each call."""
    positions: list[Tensor]
    """[length / ranks] of each call: the positions of this rank's queries."""
    query_rows: Tensor
    """[L]: the calls' queries end to end, as rows of this rank."""
    key_rows: Tensor
    """[L * ranks]: the calls' keys end to end, as rows of the gathered tensor."""
    unsort: Tensor
    """[L]: where each of this rank's rows is among the calls' queries."""


@dataclass
class ContextSeqParams(PackedSeqParams):
    """Megatron's description of a pack (with the padded lengths), with the plan of ``ContextAttention`` beside it."""

    plan: ContextPlan | None = None


@functools.lru_cache(maxsize=64)
def plan_context(lengths: tuple[int, ...], num_ranks: int, rank: int, device: torch.device) -> ContextPlan:
    """The calls for sequences of padded ``lengths``."""
    num_rows = sum(lengths) // num_ranks
    members: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        if length:
            members.setdefault(length, []).append(start)
        start += length // num_ranks
    shapes, positions, query_rows, key_rows = [], [], [], []
    for length, starts in members.items():
        share = torch.arange(length // num_ranks)
        # Row (rank, i) of a sequence holds position zigzag(rank)[i]: sorted by position they are in order.
        order = torch.cat([zigzag(length, num_ranks, r) for r in range(num_ranks)]).argsort()
        rows = torch.cat([share + r * num_rows for r in range(num_ranks)])[order]
        firsts = torch.tensor(starts)[:, None]
        shapes.append((len(starts), length))
        positions.append(zigzag(length, num_ranks, rank).to(device))
        query_rows.append((firsts + share).flatten())
        key_rows.append((firsts + rows).flatten())
    queries = torch.cat(query_rows)
    return ContextPlan(
        shapes, positions, queries.to(device), torch.cat(key_rows).to(device), queries.argsort().to(device)
    )


class _GatherRows(torch.autograd.Function):
    """[L, ...] of each rank -> [L * ranks, ...]; a row's gradient is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mine = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None


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
