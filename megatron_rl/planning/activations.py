"""What a training pass keeps of a token until its backward pass: one entry per saved tensor. Pure.

As Megatron Core 0.16 with Transformer Engine's layers, flash attention and the fused SwiGLU keeps it: a linear layer keeps
its input, a norm its input, flash attention its queries, keys, values and output. Buffers that live for a moment
only (gradients, collectives) are not counted. Experts are taken as evenly loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config.layout import expert_tensor_size
from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.families.facts import dims, text_config
from megatron_rl.families.family import ModelConfig, family_of


@dataclass(frozen=True)
class SavedTensor:
    """``width`` numbers of ``num_bytes`` each, per token of the pack."""

    name: str
    width: float
    spread: str
    """What shares it: "hidden" (the tensor-parallel group, under sequence parallelism), "heads" (always that group), or
    "gathered" (tokens at the experts, which the expert-tensor-parallel group gathers)."""
    num_bytes: int = 2


def layer_tensors(config: ModelConfig, *, with_experts: bool) -> list[SavedTensor]:
    """Of a decoder layer with or without experts, without recomputation, for a bfloat16 model."""
    sizes = dims(config)
    attention = _latent_attention(sizes) if family_of(config).is_latent else _grouped_attention(sizes)
    tensors = [
        SavedTensor("input of the attention's norm", sizes["hidden"], "hidden"),
        SavedTensor("normed, input of the projections", sizes["hidden"], "hidden"),
        *attention,
        SavedTensor("sums of the softmax", sizes["heads"], "heads", 4),
        SavedTensor("input of the MLP's norm", sizes["hidden"], "hidden"),
        SavedTensor("normed, input of the MLP", sizes["hidden"], "hidden"),
    ]
    if not with_experts:
        return [*tensors, *_gated_mlp("MLP", sizes["ffn"])]
    chosen = text_config(config).num_experts_per_tok
    return [
        *tensors,
        SavedTensor("scores of the router", 2 * sizes["experts"], "hidden", 4),
        SavedTensor("copies sent to the experts", chosen * sizes["hidden"], "gathered"),
        *_gated_mlp("experts", chosen * sizes["expert_ffn"]),
        *(_gated_mlp("shared experts", sizes["shared_ffn"]) if sizes["shared_ffn"] else ()),
    ]


def _grouped_attention(sizes: Mapping[str, int]) -> list[SavedTensor]:
    return [
        # The values are a view of it, so it stays whole; the queries and keys are copied when they are rotated.
        SavedTensor("queries, keys, values", sizes["q"] + 2 * sizes["kv"], "heads"),
        SavedTensor("rotated queries and keys", sizes["q"] + sizes["kv"], "heads"),
        SavedTensor("attended values", sizes["q"], "heads"),
    ]


def _latent_attention(sizes: Mapping[str, int]) -> list[SavedTensor]:
    return [
        SavedTensor("latent queries, before and after their norm", 2 * sizes["q_latent"], "hidden"),
        SavedTensor("latent keys and values, before and after their norm", 2 * sizes["kv_down"], "hidden"),
        SavedTensor("queries", sizes["q"], "heads"),
        SavedTensor("keys and values", sizes["kv_up"], "heads"),
        SavedTensor("queries and keys with their positions", 2 * sizes["q"], "heads"),
        SavedTensor("attended values", sizes["attended"], "heads"),
    ]


def _gated_mlp(name: str, width: int) -> list[SavedTensor]:
    return [
        SavedTensor(f"gate and up of the {name}", 2 * width, "heads"),
        SavedTensor(f"activated {name}", width, "heads"),
    ]


def layer_bytes(
    config: ModelConfig, parallel: ParallelConfig, recompute: Recompute, *, with_experts: bool
) -> tuple[float, float]:
    """(kept until the backward pass, computed again and held during this layer's), bytes per token of the pack."""
    whole = sum(_bytes(tensor, parallel) for tensor in layer_tensors(config, with_experts=with_experts))
    if recompute is Recompute.full:
        hidden = SavedTensor("input of the layer", dims(config)["hidden"], "hidden")
        return _bytes(hidden, parallel), whole
    if recompute is Recompute.selective:
        # The core of attention: with flash attention that is its softmax's sums, and its output is the next input.
        sums = SavedTensor("sums of the softmax", dims(config)["heads"], "heads", 4)
        return whole - _bytes(sums, parallel), _bytes(sums, parallel)
    return whole, 0.0


def head_bytes(config: ModelConfig, parallel: ParallelConfig, *, with_logits: bool) -> float:
    """After the last layer, bytes per token of the pack: the norm and, where they are kept, logits in both precisions."""
    sizes = dims(config)
    norm = SavedTensor("input and output of the last norm", 2 * sizes["hidden"], "hidden")
    logits = 6 * sizes["vocab"] / parallel.tensor_parallel_size if with_logits else 0.0
    return _bytes(norm, parallel) + logits


def _bytes(tensor: SavedTensor, parallel: ParallelConfig) -> float:
    tp = parallel.tensor_parallel_size
    shared_by = {
        "hidden": tp if parallel.sequence_parallel else 1,
        "heads": tp,
        "gathered": tp / expert_tensor_size(parallel),
    }[tensor.spread]
    return tensor.width * tensor.num_bytes / shared_by / parallel.context_parallel_size
