"""Attention over packs for machines without Transformer Engine: of whole sequences, and of context-parallel parts.

A pack of many sequences of different lengths runs as a few padded calls: sequences are sorted by length into buckets,
each padded to its longest member, and every bucket is one call of PyTorch's attention. The gather indices depend on the
lengths alone: a plan holds them, made once per forward pass and shared by the layers. Padding sits at the right of each
sequence, where the causal mask keeps it out of every real token's result.
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
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.models.layers.context import zigzag

_BUCKET_COST_TOKENS = 64
"""What one more attention call costs, in padded tokens; on a CPU anything from 8 to 200 runs as fast."""


@dataclass(frozen=True)
class AttentionPlan:
    """How a pack of T rows is cut into padded attention calls: buckets of sequences, laid end to end in P rows."""

    shapes: list[tuple[int, int]]
    """(sequences, longest) of each bucket; P is the sum of their products."""
    pad: Tensor
    """[P] int64: the pack's row of each place; padding repeats the sequence's last row."""
    unpad: Tensor
    """[T] int64: the place of each of the pack's rows."""


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """Megatron's description of a pack (under context parallelism with the padded lengths), with the plan of our attention."""

    plan: Any = None
    """An ``AttentionPlan``, or a ``ContextPlan`` for ``ContextAttention``."""


def plan_attention(lengths: Sequence[int], device: torch.device) -> AttentionPlan:
    """Buckets for sequences of ``lengths`` tokens (back to back in the pack), with little padding and few calls."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted((i for i, length in enumerate(lengths) if length > 0), key=lambda i: lengths[i])
    shapes, pad, unpad, placed = [], [], torch.empty(starts[-1], dtype=torch.int64), 0
    for group in _bucket(order, lengths):
        sizes = torch.tensor([lengths[i] for i in group])
        first = torch.tensor([starts[i] for i in group])
        places = torch.arange(int(sizes.max()))
        rows = first[:, None] + torch.minimum(places, sizes[:, None] - 1)
        real = places < sizes[:, None]
        # Only real places get a way back: the copies in the padding have no row of their own.
        unpad[rows[real]] = placed + real.flatten().nonzero()[:, 0]
        placed += rows.numel()
        shapes.append((rows.shape[0], rows.shape[1]))
        pad.append(rows.flatten())
    return AttentionPlan(shapes=shapes, pad=torch.cat(pad).to(device), unpad=unpad.to(device))


def _bucket(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Cut ``order`` (by rising length) where a bucket's padding would cost more than one more call.

    Exact for its cost model, padded tokens + _BUCKET_COST_TOKENS a bucket, by dynamic programming over the distinct
    lengths.
    """
    distinct = sorted({lengths[i] for i in order})
    members: dict[int, list[int]] = {length: [] for length in distinct}
    for i in order:
        members[lengths[i]].append(i)
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(distinct) + 1):
        count, candidates = 0, []
        for start in range(end - 1, -1, -1):
            count += len(members[distinct[start]])
            candidates.append((best[start][0] + count * distinct[end - 1] + _BUCKET_COST_TOKENS, start))
        # Ties go to the smaller start, hence fewer calls: the plan must be the same in every pass.
        best.append(min(candidates))
    groups, end = [], len(distinct)
    while end > 0:
        start = best[end][1]
        groups.append([i for length in distinct[start:end] for i in members[length]])
        end = start
    return groups[::-1]


class PackedAttention(MegatronModule):
    """Causal attention over a pack, given as ``PlannedSeqParams`` with the plan it takes. No dropout; for whole sequences."""

    is_context_parallel = False

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if (
            dropout != 0
            or (config.context_parallel_size > 1) != self.is_context_parallel
            or config.softmax_type != "vanilla"
        ):
            raise ValueError(
                f"{type(self).__name__} takes attention_dropout 0, softmax_type vanilla and a context_parallel_size "
                f"{'above 1' if self.is_context_parallel else 'of 1'}, got "
                f"{dropout}, {config.softmax_type} and {config.context_parallel_size}"
            )
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PlannedSeqParams | None = None,
    ) -> Tensor:
        """query [T, heads, d], key [T, groups, d], value [T, groups, e] -> [T, heads * e]; T rows of this rank."""
        if packed_seq_params is None or packed_seq_params.plan is None:
            raise ValueError(
                f"{type(self).__name__} needs PlannedSeqParams with a plan: call the model through models.packed"
            )
        return self._attended(query, key, value, packed_seq_params.plan)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        padded = [_Pad.apply(t, plan) for t in (query, key, value)]
        # Split, not slices: the backward pass of a slice fills a whole buffer with zeros.
        sizes = [sequences * longest for sequences, longest in plan.shapes]
        parts = zip(plan.shapes, *(t.split(sizes) for t in padded), strict=True)
        attended = [self._call(n, q, k, v) for (n, _), q, k, v in parts]
        return _Unpad.apply(torch.cat(attended), plan).flatten(1)

    def _call(
        self, num_sequences: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """One padded call: query [n * a, heads, d], key [n * b, groups, d] -> [n * a, heads, e]; causal without ``mask``."""
        q, k, v = (part.unflatten(0, (num_sequences, -1)).transpose(1, 2) for part in (query, key, value))
        context = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context.transpose(1, 2).flatten(0, 1)


class _Pad(torch.autograd.Function):
    """[T, ...] -> [P, ...] by the plan. Padding has no gradient: nothing that counts attends to it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.plan = plan
        return rows.index_select(0, plan.pad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.unpad), None


class _Unpad(torch.autograd.Function):
    """[P, ...] -> [T, ...] by the plan."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.plan = plan
        return rows.index_select(0, plan.unpad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        padded = grad.new_zeros((len(ctx.plan.pad), *grad.shape[1:]))
        return padded.index_copy_(0, ctx.plan.unpad, grad), None


class ContextAttention(PackedAttention):
    """Causal attention of this rank's queries to all keys and values of a pack, which are gathered over the group.

    Simple rather than fast: the mask of a bucket is a tensor.
    """

    is_context_parallel = True

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        # Gathered at once, then cut into calls: one collective per layer, whatever the number of sequences.
        keys, values = (_GatherRows.apply(t, group).index_select(0, plan.key_rows) for t in (key, value))
        query_sizes = [n * longest // group.size() for n, longest in plan.shapes]
        key_sizes = [n * longest for n, longest in plan.shapes]
        queries = query.index_select(0, plan.query_rows).split(query_sizes)
        parts = zip(plan.shapes, plan.positions, queries, keys.split(key_sizes), values.split(key_sizes), strict=True)
        attended = []
        for (n, longest), positions, q, k, v in parts:
            # Not is_causal: this rank's queries are two parts of the sequence, its keys are all of it.
            mask = positions[:, None] >= torch.arange(longest, device=k.device)
            attended.append(self._call(n, q, k, v, mask))
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
