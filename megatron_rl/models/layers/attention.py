"""Attention over packs for machines without Transformer Engine: whole sequences, and context-parallel parts.

A pack of many sequences of different lengths runs as a few padded calls: sequences are sorted by length into
buckets, each padded to its longest member, and every bucket is one call of PyTorch's attention. The gather indices
depend on the lengths alone; a plan contains them, is made once per forward pass and shared by the layers. Padding
follows each sequence, where the causal mask excludes it from every real token's result.
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
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_rl.data.batch import moved
from megatron_rl.models.layers.context import zigzag

_BUCKET_COST_TOKENS = 64
"""Cost of an additional attention call, in padded tokens; on a CPU all values from 8 to 200 are equally fast."""


@dataclass(frozen=True)
class AttentionPlan:
    """Indices that turn a pack of T rows into padded attention calls: buckets of sequences, concatenated in P rows."""

    shapes: list[tuple[int, int]]
    """(sequences, longest) of each bucket; P is the sum of the products."""
    pad: Tensor
    """[P] int64: the pack's row of each padded row; padding repeats the sequence's last row."""
    unpad: Tensor
    """[T] int64: the padded row of each of the pack's rows."""


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """Megatron's description of a pack, with the plan of ``PackedAttention``; lengths are padded under context parallelism."""

    plan: Any = None
    """An ``AttentionPlan``, or a ``ContextPlan`` for ``ContextAttention``."""


def plan_attention(lengths: Sequence[int], device: torch.device) -> AttentionPlan:
    """Buckets for the pack's sequences of ``lengths`` tokens, with little padding and few calls."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted((i for i, length in enumerate(lengths) if length > 0), key=lambda i: lengths[i])
    shapes, pad, unpad, placed = [], [], torch.empty(starts[-1], dtype=torch.int64), 0
    for group in _bucket(order, lengths):
        sizes = torch.tensor([lengths[i] for i in group])
        first = torch.tensor([starts[i] for i in group])
        offsets = torch.arange(int(sizes.max()))
        rows = first[:, None] + torch.minimum(offsets, sizes[:, None] - 1)
        real = offsets < sizes[:, None]
        # Only real rows have an inverse: the copies in the padding are dropped.
        unpad[rows[real]] = placed + real.flatten().nonzero()[:, 0]
        placed += rows.numel()
        shapes.append((rows.shape[0], rows.shape[1]))
        pad.append(rows.flatten())
    return AttentionPlan(shapes=shapes, pad=moved(torch.cat(pad), device), unpad=moved(unpad, device))


def _bucket(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Split ``order`` (ascending lengths) into buckets of minimal total cost.

    The cost is padded tokens + _BUCKET_COST_TOKENS per bucket. The minimum is exact, by dynamic programming over
    the distinct lengths.
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
        # Ties go to the smaller start (fewer calls), so that the plan is the same in every pass.
        best.append(min(candidates))
    groups, end = [], len(distinct)
    while end > 0:
        start = best[end][1]
        groups.append([i for length in distinct[start:end] for i in members[length]])
        end = start
    return groups[::-1]


class PackedAttention(MegatronModule):
    """Causal attention over a pack of whole sequences, described by ``PlannedSeqParams`` with a plan. No dropout."""

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
            or config.softmax_type == "off-by-one"
        ):
            raise ValueError(
                f"{type(self).__name__} takes attention_dropout 0, softmax_type vanilla or learnable and a context_parallel_size "
                f"{'above 1' if self.is_context_parallel else 'of 1'}, got "
                f"{dropout}, {config.softmax_type} and {config.context_parallel_size}"
            )
        self.softmax_scale = softmax_scale
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if is_windowed else None
        """Number of tokens that a token attends to, itself included; None: all."""
        num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        has_sinks = config.softmax_type == "learnable"
        self.softmax_offset = nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype)) if has_sinks else None
        """Sinks, [heads]: each head's score of a key without value, which takes part in the softmax."""

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
        """Attend: query [T, heads, d], key [T, groups, d], value [T, groups, e] -> [T, heads * e]; T rows of this rank."""
        if packed_seq_params is None or packed_seq_params.plan is None:
            raise ValueError(
                f"{type(self).__name__} needs PlannedSeqParams with a plan: call the model through models.packed_gpt"
            )
        return self._attended(query, key, value, packed_seq_params.plan)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Entries of a distributed checkpoint: the sinks, which tensor parallelism splits."""
        state, axes = self.state_dict(prefix="", keep_vars=True), {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        padded = [_Pad.apply(t, plan) for t in (query, key, value)]
        # split instead of slicing, because the backward pass of a slice fills a whole buffer with zeros.
        sizes = [sequences * longest for sequences, longest in plan.shapes]
        parts = zip(plan.shapes, *(t.split(sizes) for t in padded), strict=True)
        attended = [self._call(n, q, k, v) for (n, _), q, k, v in parts]
        return _Unpad.apply(torch.cat(attended), plan).flatten(1)

    def _call(
        self, num_sequences: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Run one padded call: query [n * a, heads, d], key [n * b, groups, d] -> [n * a, heads, e]; causal without ``mask``."""
        q, k, v = (part.unflatten(0, (num_sequences, -1)).transpose(1, 2) for part in (query, key, value))
        if self.window is not None and mask is None:
            ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            mask = ones.tril() & ones.triu(1 - self.window)
        if self.softmax_offset is not None:
            k, v, mask = _with_sinks(self.softmax_offset, q, k, v, mask)
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


def _with_sinks(
    sinks: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [n, groups, b + 1, d] with a last key of zeros, whose score is the sink in the returned mask [heads, a, b + 1].

    sinks: [heads]; query: [n, heads, a, d]; mask: [a, b] bool, causal if None. PyTorch keeps the scores for the gradient of such a mask.
    """
    shape = (query.shape[2], key.shape[2])
    allowed = torch.ones(shape, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    scores = torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill(~allowed, -torch.inf)
    last = sinks.to(query.dtype)[:, None, None].expand(-1, shape[0], 1)
    whole = torch.cat([scores.expand(len(sinks), -1, -1), last], dim=-1)
    return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), whole


class _Pad(torch.autograd.Function):
    """Pads [T, ...] to [P, ...] by the plan. Padding has no gradient, because no real token attends to it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.plan = plan
        return rows.index_select(0, plan.pad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.unpad), None


class _Unpad(torch.autograd.Function):
    """Removes the padding by the plan, [P, ...] -> [T, ...]."""

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

    Simple instead of fast: the mask of a bucket is a tensor.
    """

    is_context_parallel = True

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        # Gathered before the split into calls: one collective per layer, for any number of sequences.
        keys, values = (_GatherRows.apply(t, group).index_select(0, plan.key_rows) for t in (key, value))
        query_sizes = [n * longest // group.size() for n, longest in plan.shapes]
        key_sizes = [n * longest for n, longest in plan.shapes]
        queries = query.index_select(0, plan.query_rows).split(query_sizes)
        parts = zip(plan.shapes, plan.positions, queries, keys.split(key_sizes), values.split(key_sizes), strict=True)
        attended = []
        for (n, longest), positions, q, k, v in parts:
            # A mask instead of is_causal, because the queries are two parts of the sequence and the keys are all of it.
            mask = positions[:, None] >= torch.arange(longest, device=k.device)
            attended.append(self._call(n, q, k, v, mask))
        return torch.cat(attended).index_select(0, plan.unsort).flatten(1)


@dataclass(frozen=True)
class ContextPlan:
    """Attention calls of one rank: sequences of the same padded length share a call, so calls need no padding."""

    shapes: list[tuple[int, int]]
    """(sequences, padded length) of each call."""
    positions: list[Tensor]
    """Positions of this rank's queries, [length / ranks] per call."""
    query_rows: Tensor
    """[L]: this rank's row of each query, with the calls concatenated."""
    key_rows: Tensor
    """[L * ranks]: the gathered tensor's row of each key, with the calls concatenated."""
    unsort: Tensor
    """[L]: index of each of this rank's rows among the calls' queries."""


@functools.lru_cache(maxsize=64)
def plan_context(lengths: tuple[int, ...], num_ranks: int, rank: int, device: torch.device) -> ContextPlan:
    """Attention calls of ``rank`` for sequences of padded ``lengths``."""
    num_rows = sum(lengths) // num_ranks
    members: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        if length:
            members.setdefault(length, []).append(start)
        start += length // num_ranks
    shapes, positions, query_rows, key_rows = [], [], [], []
    for length, starts in members.items():
        offsets = torch.arange(length // num_ranks)
        # Row (rank, i) of a sequence has position zigzag(rank)[i]; argsort restores the order of positions.
        order = torch.cat([zigzag(length, num_ranks, r) for r in range(num_ranks)]).argsort()
        rows = torch.cat([offsets + r * num_rows for r in range(num_ranks)])[order]
        firsts = torch.tensor(starts)[:, None]
        shapes.append((len(starts), length))
        positions.append(moved(zigzag(length, num_ranks, rank), device))
        query_rows.append((firsts + offsets).flatten())
        key_rows.append((firsts + rows).flatten())
    queries = torch.cat(query_rows)
    indices = (queries, torch.cat(key_rows), queries.argsort())
    return ContextPlan(shapes, positions, *(moved(index, device) for index in indices))


class _GatherRows(torch.autograd.Function):
    """Gathers [L, ...] of each rank to [L * ranks, ...]; a row's gradient is the sum of its gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        local = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(local, grad.contiguous(), group=ctx.group)
        return local, None
