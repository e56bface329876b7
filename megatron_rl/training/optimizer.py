"""The optimizer of one model: Megatron's distributed Adam, its learning-rate schedule, and the guarded step.

Invariants: update k (counted from 1) uses the schedule's value for k, so the first update of a warm-up does not run
at rate 0; a step whose global gradient norm is not finite changes neither weights, nor Adam's state, nor the
schedule. All ranks wait for each other in the reduction of the gradient norm.

In a checkpoint each rank stores its own shard of the state, under the names and shapes of the weights. A rank of the
distributed optimizer has a range of the elements of some weights. Such a range of a row-major tensor consists of a few
boxes (the end of a row, whole rows, the start of a row), which Megatron's format can store and split again. So nothing is
gathered or copied: in any layout, views of the state itself are written and read. The names are those of Megatron's
"fully_reshardable" format, whose checkpoints can be read as well. Parameters that do not train have the state of a first
update: the format stacks equal layers, and a stack of which some layers train must be whole.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_rl.config.schema import DecayStyle, Moments, OptimizerConfig
from megatron_rl.errors import UserError
from megatron_rl.models.layers.torch_layers import has_transformer_engine

_BETA1 = 0.9
"""Decay of Adam's mean of gradients, per update."""
_FUSED_MAIN = "master_param"
"""State key of the main parameters in Transformer Engine's Adam if the moments have another dtype."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) per axis."""


def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], dtype: torch.dtype
) -> MegatronOptimizer:
    """AdamW over the chunks, its float32 state sharded over the data-parallel ranks (ZeRO-1).

    Biases and vectors get no weight decay (Megatron's default). Build it after the weights are loaded: with
    bfloat16 models the float32 main weights are copied here.
    """
    has_small_moments = config.moments is Moments.bfloat16
    if has_small_moments and not (has_transformer_engine() and dtype is torch.bfloat16):
        raise UserError(
            "optimizer.moments=bfloat16 needs Transformer Engine on a GPU and a bfloat16 model; set it to float32, or install "
            "Transformer Engine (docs/cluster.md)"
        )
    moments_dtype = getattr(torch, config.moments.value)
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=_BETA1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            use_distributed_optimizer=True,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_precision_aware_optimizer=has_small_moments,
            exp_avg_dtype=moments_dtype,
            exp_avg_sq_dtype=moments_dtype,
            # Checkpoints have whole float32 weights, so that any optimizer can continue from them.
            store_param_remainders=False,
        ),
        list(chunks),
        # There are no gloo copies of the groups (``create_gloo_process_groups`` in ``topology.py``).
        use_gloo_process_groups=False,
    )
    _create_adam_state(optimizer)
    return optimizer


def build_scheduler(config: OptimizerConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Linear warm-up over warmup_steps, then constant, or linear / cosine decay to min_lr at step decay_steps.

    Raises ValueError for decay without decay_steps, and for a warm-up that does not end before them.
    """
    decays = config.decay_style is not DecayStyle.constant
    if decays and config.decay_steps <= config.warmup_steps:
        raise ValueError(
            f"decay_style={config.decay_style.value} needs decay_steps greater than warmup_steps={config.warmup_steps},"
            f" got decay_steps={config.decay_steps}"
        )
    if config.min_lr > config.lr:
        raise ValueError(f"min_lr must be at most lr={config.lr}, got {config.min_lr}")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        # Megatron requires a decay that ends after the warm-up, even for a constant rate.
        lr_decay_steps=config.decay_steps if decays else config.warmup_steps + 1,
        lr_decay_style=config.decay_style.value,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def guarded_step(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> tuple[float, float]:
    """Clip and apply the finished gradients, unless their norm is not finite: then the step is skipped.

    Returns the global 2-norm before clipping, and the learning rate of this step (of the last one, if skipped).
    Megatron's own ``step`` checks for non-finite gradients only under float16 loss scaling. Here the norm decides,
    which every rank needs for clipping anyway, so all ranks decide alike.
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if math.isfinite(grad_norm):
        # Before the update, so that update k uses the schedule's value for k.
        scheduler.step(1)
        max_norm = optimizer.config.clip_grad
        for part in optimizer_parts(optimizer):
            parameters = part.get_parameters()
            if max_norm > 0.0 and parameters:
                decoupled = part.config.use_precision_aware_optimizer
                clip_grad_by_total_norm_fp32(parameters, max_norm, grad_norm, use_decoupled_grad=decoupled)
        optimizer.step_with_ready_grads()
    return grad_norm, float(optimizer.param_groups[0]["lr"])


def set_num_steps(optimizer: MegatronOptimizer, num_steps: int) -> None:
    """Set the step count of every parameter, which corrects the bias of Adam's moments."""
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups:
            if not isinstance(part.optimizer, torch.optim.AdamW):
                group["step"] = num_steps  # a fused Adam of Transformer Engine or Apex counts for all of a group
                continue
            for parameter in group["params"]:
                part.optimizer.state[parameter]["step"] = torch.tensor(float(num_steps))


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def state_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Optimizer state per parameter on this rank: main parameters (float32: views of the weights) and moments."""
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                state = part.optimizer.state[parameter].values()
                yield from (value for value in state if isinstance(value, Tensor) and value.ndim)


def weight_states(part: MegatronOptimizer, weight: torch.nn.Parameter) -> dict[str, Tensor]:
    """State in ``part`` of its share of ``weight``, each 1-D: the main parameter ("param") and the moments."""
    group, order = part.model_param_group_index_map[weight]
    main = part.optimizer.param_groups[group]["params"][order]
    moments = part.optimizer.state[main]
    return {"param": moments.get(_FUSED_MAIN, main), **{name: moments[name] for name in ("exp_avg", "exp_avg_sq")}}


def _create_adam_state(optimizer: MegatronOptimizer) -> None:
    """Create Adam's state, which Adam itself does at its first step: a model may be saved or offloaded before that."""
    for part in optimizer_parts(optimizer):
        if not part.config.use_precision_aware_optimizer:
            part.init_state_fn(part.optimizer, part.config)
            continue
        for parameter in part.get_parameters():  # not init_state_fn: Megatron 0.16.1 omits an argument there
            part.optimizer.initialize_state(parameter, part.config.store_param_remainders)
    set_num_steps(optimizer, 0)


def sharded_state(optimizer: MegatronOptimizer, weights: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    """This rank's shard of the optimizer state; ``weights``: the sharded state dicts of the chunks."""
    sharded, _ = extract_sharded_tensors_and_factories(dict(weights))
    # By identity, because the state dicts refer to the weights themselves.
    found = {id(entry.data): entry for entry in nested_values(sharded)}
    pieces: list[ShardedTensor] = []
    for part in optimizer_parts(optimizer):
        for buffer in part.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for weight, ranges in bucket["param_map"].items():
                        for name, values in weight_states(part, weight).items():
                            pieces += _pieces_of(found[id(weight)], name, values.detach(), ranges["param"].start)
    for entry in found.values():
        if isinstance(entry.data, torch.nn.Parameter) and not entry.data.requires_grad:
            pieces += _frozen_pieces(entry, optimizer.config.exp_avg_dtype)
    return {str(index): piece for index, piece in enumerate(pieces)}


def _frozen_pieces(weight: ShardedTensor | ShardedTensorFactory, moments: torch.dtype) -> Iterator[ShardedTensor]:
    """The state of this data-parallel rank's part of a weight that does not train."""
    is_expert = not getattr(weight.data, "allreduce", True)
    group = parallel_state.get_expert_data_parallel_group() if is_expert else parallel_state.get_data_parallel_group(True)
    number, num_ranks = weight.data.numel(), group.size()
    start, end = (number * rank // num_ranks for rank in (group.rank(), group.rank() + 1))
    main = weight.data.detach().reshape(-1)[start:end].float()
    for name, values in (("param", main), *((name, torch.zeros_like(main, dtype=moments)) for name in ("exp_avg", "exp_avg_sq"))):
        yield from _pieces_of(weight, name, values, start)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements start to stop of a row-major tensor as boxes, in their order; at most 2 * len(shape) - 1."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    whole_from, whole_to = -(-start // row), stop // row
    if whole_from > whole_to:  # inside one row
        yield from _in_row(shape, whole_to, start, stop)
        return
    yield from _in_row(shape, whole_from - 1, start, whole_from * row)
    if whole_from < whole_to:
        yield (whole_from, *(0 for _ in shape[1:])), (whole_to - whole_from, *shape[1:])
    yield from _in_row(shape, whole_to, whole_to * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    before = index * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - before, stop - before):
        yield (index, *offset), (1, *size)


def _pieces_of(
    weight: ShardedTensor | ShardedTensorFactory, name: str, values: Tensor, start: int
) -> Iterator[ShardedTensor]:
    """``values`` [n]: the state ``name`` of the n elements of the weight from ``start`` on."""
    key, local = (
        f"optimizer.state.{name}.{weight.key}",
        torch.empty_like(weight.data, device="meta", dtype=values.dtype),
    )
    if isinstance(weight, ShardedTensorFactory):
        # Such a weight is stored as several tensors, which are views of it: their offsets are those of the parts.
        parts = list(nested_values({"": weight.build_fn(key, local, weight.replica_id, None)}))
    else:
        parts = [replace(weight, key=key, data=local, dtype=values.dtype)]
    for part in parts:
        if not part.data.is_contiguous():
            raise NotImplementedError(f"{key}: a part that is not a range of the weight's elements")
        # The meta tensor has the weight's layout, so its offset is the part's place in the weight.
        begin = part.data.storage_offset()
        first, last = max(start, begin), min(start + len(values), begin + part.data.numel())
        position = first - start
        for offset, size in boxes(part.local_shape, first - begin, last - begin):
            yield _piece(part, values[position : position + math.prod(size)], offset, size)
            position += math.prod(size)


def _piece(part: ShardedTensor, values: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> ShardedTensor:
    size = (*(1 for _ in range(part.prepend_axis_num)), *size)
    offset = (*(0 for _ in range(part.prepend_axis_num)), *offset)
    return replace(
        part,
        data=values.view(size),
        local_shape=size,
        global_offset=tuple(a + b for a, b in zip(part.global_offset, offset, strict=True)),
        axis_fragmentations=None,  # boxes form no regular grid
        # Replicated like the weight over tensor-parallel ranks and stages, but not over data-parallel ranks.
        replica_id=(*part.replica_id[:2], 0),
        prepend_axis_num=0,
    )
