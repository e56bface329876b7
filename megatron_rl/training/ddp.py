"""The data-parallel replicas of one model: gradients are reduced during the backward pass, weights gathered after the step.

On GPUs the gradients of a bucket of parameters (40 million, or a million per rank) are reduced as soon as they are
complete, and the ranks' shards of the new weights are gathered during the next forward pass: each module waits for
its own weights. Sums are taken bucket by bucket, so their last bits may differ from those of a single collective.
On a CPU, and for a vision-language model, whose encoder has no gradient in a micro-batch without images, nothing
overlaps.

Invariant: code that reads weights outside a forward pass calls ``wait_for_weights`` first.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from megatron_rl.models.layers.torch_layers import PackedGPTModel
from megatron_rl.models.vision_gpt import VisionGPTModel
from megatron_rl.parallel.topology import Topology
from megatron_rl.training.losses import Metrics

_BUCKET_SIZE: int | None = None
"""Number of parameters per bucket; None: Megatron's default."""
_TE_ACCUMULATES = "fuse_wgrad_accumulation"
"""Attribute of Transformer Engine's linear layers: the kernel of the gradient product adds to the float32 gradients."""

_GROUPED = "num_gemms"
"""Attribute of Transformer Engine's linear layers for several experts."""


def wrap(chunks: Sequence[PackedGPTModel], dtype: torch.dtype) -> list[DistributedDataParallel]:
    """Wrap the chunks in Megatron's DDP (contiguous gradient buffers), set up for undivided losses."""
    overlaps = _can_overlap(chunks)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=dtype is not torch.float32,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        bucket_size=_BUCKET_SIZE,
    )
    for chunk in chunks:
        _mark_split_weights(chunk)
        _accumulate_in_place(chunk)
        # With Megatron's "per-token loss" the schedule scales no loss, and DDP sums instead of averaging.
        chunk.config.calculate_per_token_loss = True
        chunk.config.finalize_model_grads_func = _finalize_undivided
        chunk.config.grad_scale_func = None
    wrapped = [
        DistributedDataParallel(config=chunk.config, ddp_config=settings, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if overlaps:
        syncs = [replica.no_sync for replica in wrapped]
        chunks[0].config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        for replica in wrapped:
            # With this setting the caller of the step starts the gathers, and each module waits for its own.
            replica.overlap_param_gather_with_optimizer_step = True
        for group in _bucket_groups(wrapped):
            # There is nothing to gather yet: every rank starts with all weights.
            group.param_gather_dispatched = True
    return wrapped


def _can_overlap(chunks: Sequence[PackedGPTModel]) -> bool:
    return torch.cuda.is_available() and not isinstance(chunks[0], VisionGPTModel)


def start_weight_allgather(replicas: Sequence[DistributedDataParallel]) -> None:
    """Start to gather the weights after an optimizer step, also a skipped one, unless the step has gathered them."""
    for replica in replicas:
        if replica.ddp_config.overlap_param_gather:
            replica.start_param_sync(force_dispatch=True)


def wait_for_weights(replicas: Sequence[DistributedDataParallel]) -> None:
    """Wait until the weights are complete on this rank. Not collective."""
    waiting = [group for group in _bucket_groups(replicas) if group.param_gather_handle is not None]
    for group in waiting:
        group.finish_param_sync(skip_next_bucket_dispatch=True)
    if waiting and torch.cuda.is_available():
        # So far only the caller's stream waits, but another stream may use the weights next.
        torch.cuda.current_stream().synchronize()


def reduce_metrics(metrics: Sequence[Metrics], topology: Topology) -> dict[str, tuple[float, float]]:
    """Sums over micro-batches and data-parallel ranks, then from the last pipeline stage to the others."""
    result: list[dict[str, tuple[float, float]]] = [{}]
    names = sorted(metrics[0]) if topology.is_last_stage else []
    if names:
        pairs = torch.stack([value for microbatch in metrics for name in names for value in microbatch[name]])
        totals = pairs.detach().to(torch.float64).view(len(metrics), len(names), 2).sum(0)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        result = [{name: (total, denominator) for name, (total, denominator) in zip(names, totals.tolist(), strict=True)}]
    if topology.pp_size > 1:
        last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(result, last_rank, parallel_state.get_pipeline_model_parallel_group())
    return result[0]


def _bucket_groups(replicas: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    for replica in replicas:
        yield from replica.bucket_groups + replica.expert_parallel_bucket_groups


def _accumulate_in_place(chunk: torch.nn.Module) -> None:
    """Let Transformer Engine's layers add weight gradients directly to the gradient buffer.

    Set on the layers, because the same setting in Megatron's configuration requires Apex, which these layers do not need.
    """
    for module in chunk.modules():
        if hasattr(module, _TE_ACCUMULATES):
            setattr(module, _TE_ACCUMULATES, True)


def _mark_split_weights(chunk: torch.nn.Module) -> None:
    """Mark the weights that are split over the tensor-parallel ranks.

    Megatron marks weights when it initializes them, so loaded weights have no mark. The gradient norm counts a
    weight without a mark on the first tensor-parallel rank only, as a copy. Transformer Engine marks the weights of
    all its linear layers, also those of latent attention that are whole on every rank, which the norm would count
    on each rank; version 2.20 marks no weight of its grouped layers.
    """
    for parameter in chunk.parameters():
        if getattr(parameter, "sequence_parallel", False) and getattr(parameter, "tensor_model_parallel", False):
            vars(parameter)["tensor_model_parallel"] = False
    for module in chunk.modules():
        weights: list[Any] = []
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)):
            weights = [module.weight]
        elif hasattr(module, _GROUPED):
            weights = list(module.parameters(recurse=False))
        for weight in weights:
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                dim = 1 if isinstance(module, RowParallelLinear) else 0
                set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)


def _finalize_undivided(model: list[torch.nn.Module], num_tokens: Tensor | None, **options: Any) -> None:
    """Megatron's reductions over data-, tensor- and pipeline-parallel ranks without its division by tokens."""
    finalize_model_grads(model, None, **options)
