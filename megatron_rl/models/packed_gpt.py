"""GPT models over packed batches: builds this rank's part of a model, and runs its forward pass.

Callers pass a ``PackedBatch``. This module hides the padding of the pack to a multiple of the tensor-parallel size
(required by sequence parallelism), this rank's part of the pack under context parallelism, Megatron's sequence
parameters, and the attention plan.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.data.batch import PackedBatch, moved
from megatron_rl.errors import ModelError
from megatron_rl.families.model_facts import takes_images, text_config
from megatron_rl.families.vision_encoder import build_encoder, num_deepstack
from megatron_rl.models.hf.megatron_config import megatron_config, transformer_class
from megatron_rl.models.image_encoding import prepare_encoder
from megatron_rl.models.layers.attention import (
    ContextAttention,
    PackedAttention,
    PlannedSeqParams,
    plan_attention,
    plan_context,
)
from megatron_rl.models.layers.context import pack_alignment, split_here, zigzag
from megatron_rl.models.layers.moe import check_moe, install_dispatcher, moe_kwargs
from megatron_rl.models.layers.rope import install_rope
from megatron_rl.models.layers.routing import ROUTERS, RoutingTrace, follow_traces, with_attribute, with_trace
from megatron_rl.models.layers.torch_layers import (
    SPLIT_GRADIENT_MARK,
    PackedGPTModel,
    block_spec,
    has_transformer_engine,
    restore_float32,
    swap_layers,
    unwrap,
)
from megatron_rl.models.megatron_fields import MegatronSettings, check_fp8, checked_fields, fp8_kwargs
from megatron_rl.models.vision_gpt import DeepstackLayer, VisionGPTModel
from megatron_rl.parallel.topology import local_device

__all__ = ["PackedGPTModel", "build_chunks", "forward", "sequence_starts", "unwrap"]

_OWN_OF_RANK = re.compile(r"\.softmax_offset$|\.experts\..*linear_fc2\.bias\d*$")
"""Vectors that differ between tensor-parallel ranks, which Megatron and Transformer Engine mark as copies: sinks and experts' biases."""
_READ = "read_rows"
"""Attribute of a pack's parameters."""
PAD_TOKEN_ID = 0
"""Token that pads the pack under sequence parallelism; the padding is a separate sequence without results."""


class _LastLayer(TransformerLayer):
    """A dense model's last layer, whose MLP runs on the rows whose outputs are read; the others' outputs are those of its attention."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        self._read = getattr(packed_seq_params, _READ, None)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._read is None:
            return super()._forward_mlp(hidden_states, *args, **kwargs)
        finished = super()._forward_mlp(hidden_states.index_select(0, self._read), *args, **kwargs)
        return hidden_states.index_copy(0, self._read, finished)


def build_chunks(
    hf_config: PretrainedConfig,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    recompute: Recompute,
    share_embeddings: bool,
    settings: MegatronSettings,
) -> list[PackedGPTModel]:
    """This rank's pipeline stage with uninitialized weights, on its device; several chunks if the pipeline is interleaved.

    The process groups must exist. Raises ModelError for settings that this model or machine does not support.
    """
    check_moe(settings.moe, hf_config, parallel)
    check_fp8(settings.fp8, dtype)
    given = checked_fields(settings.fields)
    overrides = moe_kwargs(settings.moe, hf_config, parallel) | fp8_kwargs(settings.fp8) | given
    kwargs, model_kwargs = megatron_config(hf_config, parallel, dtype=dtype, recompute=recompute, **overrides)
    model_kwargs["share_embeddings_and_output_weights"] = share_embeddings
    try:
        config = transformer_class(hf_config)(**kwargs)
    # ImportError, because a field may request a kernel that is not installed.
    except (AssertionError, ValueError, ImportError) as error:
        if not given:
            raise
        raise ModelError(f"Megatron refuses this model with the fields {given}: {error}") from error
    stages = range(parallel.virtual_pipeline_size) if parallel.virtual_pipeline_size > 1 else [None]
    chunks = [_build_chunk(config, stage, hf_config, model_kwargs, dtype) for stage in stages]
    for chunk in chunks:
        install_dispatcher(chunk, settings.moe.dispatcher)
    if takes_images(hf_config):
        for chunk in chunks:
            _add_vision(chunk, hf_config, dtype, recompute)
    return chunks


def _build_chunk(
    config: TransformerConfig,
    vp_stage: int | None,
    hf_config: PretrainedConfig,
    model_kwargs: dict[str, Any],
    dtype: torch.dtype,
) -> PackedGPTModel:
    spec = swap_layers(block_spec(config, vp_stage), ROUTERS)
    if config.context_parallel_size > 1 and not has_transformer_engine():
        spec = swap_layers(spec, {PackedAttention: ContextAttention})
    if takes_images(hf_config) and num_deepstack(hf_config.vision_config):
        spec = swap_layers(spec, {TransformerLayer: DeepstackLayer})
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    has_all_rows = config.context_parallel_size == 1 and not config.sequence_parallel
    if is_last and has_all_rows and not config.num_moe_experts and not has_transformer_engine():
        spec.layer_specs[-1:] = [swap_layers(spec.layer_specs[-1], {TransformerLayer: _LastLayer})]
    model = (VisionGPTModel if takes_images(hf_config) else PackedGPTModel)(
        config,
        spec,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=is_last,
        vp_stage=vp_stage,
        **model_kwargs,
    )
    if model.pre_process:
        model.embedding.register_forward_hook(_with_nested_strides)
    if model.post_process:  # other stages free what they have sent, which must not be a view
        model.decoder.register_forward_hook(_with_nested_strides)
    install_rope(model, hf_config)
    for name, parameter in model.named_parameters():
        if _OWN_OF_RANK.search(name):
            # Without the first mark norms count those of one rank only; by the second, ranks with other experts would sum the gradients.
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
            setattr(parameter, SPLIT_GRADIENT_MARK, False)
    model.real_vocab_size = text_config(hf_config).vocab_size
    follow_traces(model)
    model.to(dtype)
    # The cast includes the routers' biases, which Megatron keeps in float32.
    restore_float32(model)
    if torch.cuda.is_available():
        model.cuda()
    return model


def _with_nested_strides(module: nn.Module, inputs: tuple[Any, ...], hidden: Tensor) -> Tensor:
    """Hook: view hidden states [T, 1, H], and their gradient, with the strides (H, H, 1).

    Megatron's transposed [1, T, H] has the strides (H, T * H, 1). Without a gradient ``torch.matmul`` then runs T products of one row
    instead of one product of T rows, which takes three times as long.
    """
    return hidden.flatten(0, 1).unflatten(0, hidden.shape[:2])


def _add_vision(model: VisionGPTModel, hf_config: PretrainedConfig, dtype: torch.dtype, recompute: Recompute) -> None:
    """Add the parts of a vision-language model that GPTModel does not have."""
    model.see(hf_config)
    if model.pre_process:
        model.vision = prepare_encoder(
            build_encoder(hf_config.vision_config),
            dtype=dtype,
            recompute=recompute,
            sequence_parallel=model.config.sequence_parallel,
        )


def forward(
    chunk: nn.Module,
    batch: PackedBatch,
    trace: RoutingTrace | None = None,
    read: Callable[[PackedBatch], Tensor | None] = lambda _: None,
) -> Tensor:
    """Run this stage on ``batch``, which is in host memory; ``chunk`` may be wrapped for data parallelism.

    ``trace``: routing instructions of a mixture-of-experts model for this pass; the same for all chunks. ``read``
    returns the tokens [T] bool whose outputs are read, at least one, or None for all; others need not be computed to the end. The result
    is for Megatron's schedule: hidden states for the next stage, or on the last stage the input of
    ``policy.token_logprobs`` or ``critic.token_values``.
    """
    model = unwrap(chunk)
    tokens, positions, params = _model_inputs(batch, model.config)
    params, visual = with_trace(params, trace), {}
    if isinstance(model.decoder.layers[-1], _LastLayer) and (outputs := read(batch)) is not None:
        params = with_attribute(params, _READ, moved(outputs.nonzero()[:, 0], tokens.device))
    if isinstance(model, VisionGPTModel):
        positions, visual["visual"] = model.visual_inputs(batch, tokens.device)
    return chunk(tokens, positions, None, packed_seq_params=params, **visual)


def sequence_starts(batch: PackedBatch) -> Tensor:
    """First rows of the pack's non-empty sequences, in host memory."""
    return batch.cu_seqlens[:-1][batch.lengths > 0]


def _model_inputs(batch: PackedBatch, config: TransformerConfig) -> tuple[Tensor, Tensor, PackedSeqParams]:
    """Tokens [1, T'], positions [1, T'] and sequence parameters, where T' is the padded length of this rank's part."""
    if len(batch.tokens) == 0:
        raise ValueError("an empty batch cannot pass through the model; skip the micro-batch on every rank")
    device = local_device()
    lengths, tokens = tuple(batch.lengths.tolist()), batch.tokens
    if config.context_parallel_size > 1:
        split = split_here(lengths, config)
        rows = split.token_of_row
        tokens = torch.where(rows >= 0, tokens[rows], PAD_TOKEN_ID)
        num_ranks = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        positions, params = _sequence_params(split.lengths, device, num_ranks, rank)
        return moved(tokens, device)[None], positions[None], params
    padding = -len(tokens) % pack_alignment(config)
    if padding:
        lengths = (*lengths, padding)
        tokens = torch.cat([tokens, tokens.new_full((padding,), PAD_TOKEN_ID)])
    positions, params = _sequence_params(lengths, device)
    return moved(tokens, device)[None], positions[None], params


@functools.lru_cache(maxsize=64)
def _sequence_params(
    lengths: tuple[int, ...], device: torch.device, num_ranks: int = 1, rank: int = 0
) -> tuple[Tensor, PackedSeqParams]:
    """Positions and sequence parameters of one of ``num_ranks`` context-parallel ranks.

    ``lengths``: lengths of the whole sequences, with padding. Cached, because every pass over a batch has the same lengths.
    """
    is_split = num_ranks > 1
    own = [zigzag(length, num_ranks, rank) if is_split else torch.arange(length) for length in lengths if length]
    cu_seqlens = moved(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device)
    common = dict(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    positions = moved(torch.cat(own), device)
    if has_transformer_engine():
        return positions, PackedSeqParams(**common)
    plan = plan_context(lengths, num_ranks, rank, device) if is_split else plan_attention(lengths, device)
    return positions, PlannedSeqParams(plan=plan, **common)
