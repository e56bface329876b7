"""Layers for machines without Transformer Engine: a norm, attention over packed sequences, and the spec that uses them.

Attention over a pack of many sequences of different lengths runs as a few padded calls: sequences are sorted by length
into buckets, each padded to its longest member, and every bucket is one call of PyTorch's attention. The gather
indices depend on the lengths alone: ``AttentionPlan`` holds them, made once a forward pass and shared by the layers.
Padding sits at the right of each sequence, where the causal mask keeps it out of every real token's result.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import LNImpl, get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

_BUCKET_COST_TOKENS = 64
"""What one more attention call costs, in padded tokens; on a CPU anything from 8 to 200 runs as fast."""


def has_transformer_engine() -> bool:
    """Transformer Engine's layers are used wherever a GPU and the library are present."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """How a pack of T rows is cut into padded attention calls: buckets of sequences, laid end to end in P rows."""

    shapes: list[tuple[int, int]]
    """(sequences, longest) of each bucket; P is the sum of their products."""
    pad: Tensor
    """[P] int64: the pack's row of each place; padding repeats the sequence's last row."""
    unpad: Tensor
    """[T] int64: the place of each of the pack's rows."""


@dataclasses.dataclass
class PlannedSeqParams(PackedSeqParams):
    """Megatron's description of a pack, with the plan of our attention beside it."""

    plan: AttentionPlan | None = None


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
        best.append(min(candidates))
    groups, end = [], len(distinct)
    while end > 0:
        start = best[end][1]
        groups.append([i for length in distinct[start:end] for i in members[length]])
        end = start
    return groups[::-1]


class _LocalNorm(nn.Module):
    """RMSNorm or LayerNorm in plain PyTorch; its parameters are marked for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.shape, self.eps, self.kind = (hidden_size,), eps, config.normalization
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.zeros(hidden_size) if self.zero_centered else torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if self.kind == "LayerNorm" else None
        for parameter in self.parameters():
            # Megatron sums the gradients of parameters so marked over the tensor-parallel group.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.kind == "RMSNorm":
            return F.rms_norm(hidden, self.shape, weight, self.eps)
        return F.layer_norm(hidden, self.shape, weight, self.bias, self.eps)


class PackedAttention(MegatronModule):
    """Causal attention over a pack, given as ``PlannedSeqParams`` with a plan. No dropout; for whole sequences."""

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
        """query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]."""
        if packed_seq_params is None or packed_seq_params.plan is None:
            raise ValueError("PackedAttention needs PlannedSeqParams with a plan: call the model through models.packed")
        plan = packed_seq_params.plan
        padded = [_Pad.apply(t, plan) for t in (query, key, value)]
        # Split, not slices: the backward pass of a slice fills a whole buffer with zeros.
        sizes = [sequences * longest for sequences, longest in plan.shapes]
        attended = []
        for shape, *parts in zip(plan.shapes, *(t.split(sizes) for t in padded), strict=True):
            q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
            context = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            attended.append(context.transpose(1, 2).flatten(0, 1))
        return _Unpad.apply(torch.cat(attended), plan).flatten(1)


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


class _ReplicatedLinear(nn.Linear):
    """A linear layer without bias, whole on every tensor-parallel rank; called as Megatron calls its layers."""

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=config.params_dtype)
        # Each rank sees part of the tokens: Megatron sums gradients so marked over the group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return super().forward(hidden), None


class _LatentAttention(MLASelfAttention):
    """Megatron's latent attention with the projections to the latents whole on every rank, as Transformer Engine has them.

    Split over the ranks, as Megatron's own layers are, the shared rotary key would get the gradient of one rank's heads
    alone. With more than one rank, sequence parallelism is needed for the same reason.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        latent_size = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = _ReplicatedLinear(config.hidden_size, latent_size, config)


_LOCAL_LAYERS: dict[type, type] = {
    DotProductAttention: PackedAttention,
    WrappedTorchNorm: _LocalNorm,
    LNImpl: _LocalNorm,
    MLASelfAttention: _LatentAttention,
}
"""Megatron's layers that need a GPU or take no packs, and ours in their place (LNImpl is Apex's where installed)."""


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (of its chunk ``vp_stage``): Transformer Engine's where present, else ours."""
    on_gpu = has_transformer_engine()
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=on_gpu, normalization=config.normalization, vp_stage=vp_stage
    )
    if on_gpu:
        return spec
    return swap_layers(spec, _LOCAL_LAYERS)


def keep_float32(model: nn.Module) -> None:
    """Undo a cast of the model for what stays in float32: the routers' expert biases."""
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            module.expert_bias = module.expert_bias.float()


def swap_layers(spec: Any, table: dict[type, type]) -> Any:
    """``spec`` with the classes in ``table`` replaced, anywhere in the tree of module specs."""
    if isinstance(spec, type):
        return table.get(spec, spec)
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(
            spec, module=swap_layers(spec.module, table), submodules=swap_layers(spec.submodules, table)
        )
    if dataclasses.is_dataclass(spec):
        fields = {f.name: swap_layers(getattr(spec, f.name), table) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **fields)
    if isinstance(spec, list):
        return [swap_layers(item, table) for item in spec]
    return spec
