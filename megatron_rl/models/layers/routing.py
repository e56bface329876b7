"""Records, replays, counts and balances the routing of tokens to experts, one micro-batch at a time.

A ``RoutingTrace`` belongs to one forward pass of one micro-batch. The trace is attached to the pack's sequence
parameters, so that every layer gets the trace of *its* micro-batch, even with interleaved pipeline stages and when
a layer is recomputed in backward.

Routes are stored as ``routes`` [T, L, K]: expert id + 1 of token t in layer l, or 0 without a record. L counts all
layers of the model, including dense layers (all 0). Rows of zeros (dummies, padding, tokens without routes from a
server) mean "no record", so the maximum over ranks merges the records of all ranks.

Invariants:

- The scores are always the current scores: replay fixes the chosen set, the router keeps its gradient.
- Replay depends on the set of experts of a token, not on their order in the record; replaying a pass's own record
  changes no bit.
- A token without a record is routed natively, layer by layer.
- Loads count every real token of a micro-batch once, even if a layer runs several times; padding is never counted.
- The auxiliary loss is a sum over sequences: it does not depend on micro-batches, packing or layout.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_rl.data.batch import moved
from megatron_rl.system.megatron_core import experts_sorted

_TRACE = "routing_trace"
"""Attribute of a pack's sequence parameters, which Megatron passes to every layer, also when it recomputes the layer."""


@dataclass
class RoutingStats:
    """Routing statistics of the passes over one micro-batch. They outlive the passes, unlike the passes' inputs."""

    loads: Tensor
    """[L, E] float64: tokens of this rank that were routed to each expert."""
    recorded: Tensor | None = None
    """[T, L, K] int16: routes, which this rank fills for its own tokens and layers."""
    aux_loss: Tensor | None = None
    """This rank's summand of the auxiliary loss, summed over layers, for metrics."""
    num_replayed: Tensor | None = None
    """Number of token-layer pairs of this rank that followed a record."""
    seen: set[int] = field(default_factory=set)
    """Layers that have run; a layer that runs again (recompute) is not counted again."""


@dataclass
class RoutingTrace:
    """Routing instructions and statistics of one pass over one micro-batch."""

    rows: Tensor
    """[T_local] int64: the pack's row of each token on this rank; -1 for padding."""
    real: Tensor
    """[R] int64: indices of the entries of ``rows`` that are not padding; stored, because computing them blocks the GPU."""
    sequences: Tensor
    """[T_local] int64: index of each token's sequence; -1 for padding."""
    sequence_lengths: Tensor
    """[N] int64: lengths of the whole sequences."""
    account: RoutingStats
    replayed: Tensor | None = None
    """[T, L, K] routes to follow, of any integer dtype."""
    aux_loss_scale: float = 0.0
    """Coefficient of the balance loss divided by the number of tokens of the whole update; 0 for no balance loss."""

    def wanted(self, layer: int) -> Tensor | None:
        """[T_local, K] routes of ``layer`` to follow; tokens with rows of 0 are routed natively."""
        if self.replayed is None:
            return None
        routes = self.replayed[self.rows.clamp(min=0), layer].to(torch.int64)
        complete = (routes > 0).all(-1) & (self.rows >= 0)
        return torch.where(complete[:, None], routes, 0)

    @property
    def needs_ids(self) -> bool:
        """True if the pass follows or records routes, which a fused router supports neither as input nor as output."""
        return self.replayed is not None or self.account.recorded is not None

    def note(self, layer: int, routing_map: Tensor, ids: Tensor | None, wanted: Tensor | None) -> bool:
        """Count (and record) the choice of ``layer``; returns False if the layer was counted before.

        ``routing_map`` [T_local, E]; ``ids`` [T_local, K]: the same choice as expert ids, best first, or None from
        a fused router; ``wanted`` [T_local, K]: the routes to follow.
        """
        account = self.account
        if layer in account.seen:
            return False
        account.seen.add(layer)
        if ids is None:
            account.loads[layer] += routing_map[self.real].sum(0)
            return True
        chosen = ids[self.real]
        account.loads[layer].index_add_(0, chosen.flatten(), account.loads.new_ones(chosen.numel()))
        if wanted is not None:
            followed = (wanted[:, 0] > 0).sum()
            account.num_replayed = followed if account.num_replayed is None else account.num_replayed + followed
        if account.recorded is not None:
            account.recorded[self.rows[self.real], layer] = (chosen + 1).to(account.recorded.dtype)
        return True


class TracedRouter(TopKRouter):
    """Megatron's router, extended to follow the current trace's routes and to report its choice to the trace."""

    config: TransformerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trace: RoutingTrace | None = None
        self.router_replay = _Choice()
        self.may_fuse = self.config.moe_router_fusion
        # A copy, because passes that need ids disable the fused kernel of this router.
        self.config = copy.copy(self.config)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and routing map, both [T_local, E], of logits [T_local, 1, E]."""
        trace, choice, layer = self.trace, self.router_replay, self.layer_number - 1
        choice.wanted = None if trace is None else trace.wanted(layer)
        self.config.moe_router_fusion = self.may_fuse and not (trace is not None and trace.needs_ids)
        probs, routing_map = super().routing(logits, padding_mask)
        if trace is None:
            return probs, routing_map
        is_fused = self.config.moe_router_fusion
        ids = None if is_fused else choice.chosen
        is_first_run = trace.note(layer, routing_map, ids, choice.wanted)
        if trace.aux_loss_scale:
            loss = self._balance_loss(logits.view(len(routing_map), -1), routing_map, trace)
            if is_first_run:
                account = trace.account
                account.aux_loss = loss.detach() if account.aux_loss is None else account.aux_loss + loss.detach()
            if torch.is_grad_enabled():
                probs = _WithLoss.apply(probs, loss)
        return probs, routing_map

    def _balance_loss(self, logits: Tensor, routing_map: Tensor, trace: RoutingTrace) -> Tensor:
        scores = normalized_scores(logits, self.score_function)
        return trace.aux_loss_scale * sequence_balance_loss(
            scores,
            routing_map,
            trace.sequences,
            trace.sequence_lengths,
            topk=self.topk,
            # A sequence's tokens may be on several ranks of this group.
            group=parallel_state.get_tensor_and_context_parallel_group(),
        )


class _Choice:
    """Replaces Megatron's RouterReplay, whose global list and single record per layer support one micro-batch at a time.

    Megatron calls ``get_replay_topk`` only.
    """

    wanted: Tensor | None = None
    """[T_local, K] routes to follow; None routes all tokens natively."""
    chosen: Tensor
    """[T_local, K] ids, after each call."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        with experts_sorted():
            top_scores, ids = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.wanted is not None:
            top_scores, ids = replay(scores, ids, self.wanted)
        self.chosen = ids
        return top_scores, ids


def replay(scores: Tensor, native_ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(scores, ids) [T, K] of the experts in ``wanted`` [T, K] (routes; rows of 0 use ``native_ids``), best first.

    Experts are sorted by score as in a native choice, so that sums over a token's experts have the same rounding.
    """
    ids = torch.where(wanted > 0, wanted - 1, native_ids)
    order = scores.detach().gather(1, ids).argsort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    return scores.gather(1, ids), ids


def normalized_scores(logits: Tensor, score_function: str) -> Tensor:
    """[T, E] float32 with row sums of 1: the tokens' expert probabilities, as the balance loss defines them."""
    if score_function == "softmax":
        return torch.softmax(logits.float(), -1)
    scores = torch.sigmoid(logits.float())
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def sequence_balance_loss(
    scores: Tensor,
    routing_map: Tensor,
    sequences: Tensor,
    sequence_lengths: Tensor,
    *,
    topk: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """This rank's summand of sum over sequences of T_s * sum_i f_i P_i (DeepSeek-V3 eq. 17 to 20, arXiv 2412.19437).

    f_i = E / (K T_s) * (tokens of the sequence routed to expert i), a constant; P_i = mean of scores [T, E] over
    the sequence. Even loads give T_s. ``sequences`` [T]: index of each token's sequence, -1 for padding. ``group``:
    ranks with other tokens of the same sequences; the loss is the sum of the results over these ranks.
    """
    num_experts, num_sequences = scores.shape[1], len(sequence_lengths)
    # Padding is an additional sequence of weight 0.
    indices = torch.where(sequences >= 0, sequences, num_sequences)
    counts = torch.zeros(num_sequences + 1, num_experts, dtype=torch.float32, device=scores.device)
    counts.index_add_(0, indices, routing_map.to(torch.float32))
    if group is not None and group.size() > 1:
        dist.all_reduce(counts, group=group)
    weights = torch.nn.functional.pad((num_experts / topk) / sequence_lengths.clamp(min=1), (0, 1))
    frequencies = counts * weights[:, None]
    # T_s * f_i P_i summed over experts is the sum over the sequence's tokens of f . scores.
    return (frequencies[indices] * scores).sum()


class _WithLoss(torch.autograd.Function):
    """Returns ``values`` unchanged; in backward, adds ``loss`` to the loss being minimized."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=torch.float32)


ROUTERS: dict[type, type] = {TopKRouter: TracedRouter}
"""Replacement of Megatron's router, for ``layers.swap_layers``."""


def follow_traces(chunk: nn.Module) -> None:
    """Register hooks that pass the pack's trace to the router of each layer of ``chunk`` whenever the layer runs."""

    def set_trace(layer: TransformerLayer, args: Any, kwargs: dict[str, Any]) -> None:
        layer.mlp.router.trace = vars(kwargs["packed_seq_params"]).get(_TRACE)

    for module in chunk.modules():
        if isinstance(module, TransformerLayer) and isinstance(getattr(module.mlp, "router", None), TracedRouter):
            module.register_forward_pre_hook(set_trace, with_kwargs=True)


def with_trace(params: PackedSeqParams, trace: RoutingTrace | None) -> PackedSeqParams:
    """``params`` with ``trace`` attached."""
    return with_attribute(params, _TRACE, trace)


def with_attribute(params: PackedSeqParams, name: str, value: object) -> PackedSeqParams:
    """``params`` with an attribute for one pass, unless it is None; a copy, because all passes over the same lengths share ``params``."""
    if value is None:
        return params
    params = copy.copy(params)
    setattr(params, name, value)
    return params


def routers(chunks: Sequence[nn.Module]) -> list[TracedRouter]:
    """All routers of this rank, sorted by layer."""
    unsorted = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TracedRouter)]
    return sorted(unsorted, key=lambda router: router.layer_number)


def new_account(config: TransformerConfig, num_tokens: int, device: torch.device, *, records: bool) -> RoutingStats:
    shape = (num_tokens, config.num_layers, config.moe_router_topk)
    return RoutingStats(
        loads=torch.zeros(config.num_layers, config.num_moe_experts, dtype=torch.float64, device=device),
        recorded=torch.zeros(shape, dtype=torch.int16, device=device) if records else None,
    )


def new_trace(
    rows: Tensor,
    cu_seqlens: Tensor,
    account: RoutingStats,
    *,
    replayed: Tensor | None = None,
    aux_loss_scale: float = 0.0,
) -> RoutingTrace:
    """A trace for a micro-batch with sequences ``cu_seqlens`` [N+1]; ``rows``: see ``RoutingTrace``.

    The inputs are in host memory, so that no size blocks on the GPU; the trace's tensors are on the account's device.
    """
    device, is_real = account.loads.device, rows >= 0
    # right=True, because a row where several sequences start (the first ones empty) belongs to the last of them.
    sequences = torch.searchsorted(cu_seqlens[1:].contiguous(), rows.clamp(min=0), right=True)
    return RoutingTrace(
        rows=moved(rows, device),
        real=moved(is_real.nonzero()[:, 0], device),
        sequences=moved(torch.where(is_real, sequences, -1), device),
        sequence_lengths=moved(cu_seqlens[1:] - cu_seqlens[:-1], device),
        account=account,
        replayed=None if replayed is None else moved(replayed, device),
        aux_loss_scale=aux_loss_scale,
    )


def gather_routes(account: RoutingStats) -> Tensor:
    """Routes [T, L, K] int16 in host memory, merged from the records of all ranks of this replica; collective.

    All these ranks get the same result.
    """
    if account.recorded is None:
        raise ValueError("gather_routes: expected the account of a recording pass, got one without a record")
    # int32, because neither gloo nor NCCL supports 16-bit integers.
    recorded = account.recorded.to(account.loads.device, torch.int32)
    for group in (
        parallel_state.get_tensor_and_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        if group.size() > 1:
            dist.all_reduce(recorded, op=dist.ReduceOp.MAX, group=group)
    return recorded.to(torch.int16).cpu()


def load_metrics(loads: Tensor) -> dict[str, tuple[float, float]]:
    """Metrics as (sum, denominator) of loads [L, E] over the MoE layers (layers with any load); empty if there are none.

    ``moe_max_load``: largest load of an expert, divided by its layer's mean. ``moe_dead_share``: fraction of
    experts without a token. ``moe_load_entropy``: entropy of the load divided by log E (1 is even), mean over
    layers.
    """
    loads = loads[loads.sum(1) > 0].double()
    if len(loads) == 0:
        return {}
    num_layers, num_experts = loads.shape
    shares = loads / loads.sum(1, keepdim=True)
    entropies = torch.special.entr(shares).sum(1) / torch.tensor(float(max(num_experts, 2))).log()
    return {
        "moe_max_load": (float(shares.max()) * num_experts, 1.0),
        "moe_dead_share": (float((loads == 0).sum()), float(num_layers * num_experts)),
        "moe_load_entropy": (float(entropies.sum()), float(num_layers)),
    }


def updated_bias(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """Expert bias [E] after an update: raised by ``rate`` for experts below the mean load, lowered for experts above.

    Auxiliary-loss-free load balancing, arXiv 2408.15664.
    """
    return bias + rate * torch.sign(loads.mean() - loads).to(bias)
