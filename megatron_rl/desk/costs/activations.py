"""What a training pass keeps of a token until its backward pass: one entry per saved tensor. Pure.

As Megatron Core 0.16 with Transformer Engine's layers, flash attention and the fused SwiGLU keeps it: a linear layer keeps
its input, a norm its input, flash attention its queries, keys, values and output. Buffers that live for a moment
only (gradients, collectives) are not counted. Experts are taken as evenly loaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.config.layout import expert_tensor_size
from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.families.family import ModelConfig, family_of
from megatron_rl.families.model_facts import dims, text_config

_TOKENS_PER_CHUNK = 512
"""Of the logits, as in models/logprobs.py ..."""
_LOGITS_PER_CHUNK = 2**22
"""... and training/engine.py."""
_NORMED = "normed, input of the projections"
_RECOMPUTED = (
    *("queries", "keys and values", "queries and keys with their positions"),
    *("normed, input of the MLP", "gate and up of the MLP", "activated MLP", "activated experts"),
)


@dataclass(frozen=True)
class SavedTensor:
    """``width`` numbers per token of the pack."""

    name: str
    width: float
    spread: str
    """What shares it: "hidden" (the tensor-parallel group, under sequence parallelism), "heads" (always that group), or
    "gathered" (tokens at the experts, which the expert-tensor-parallel group gathers)."""
    in_float32: bool = False
    """Whatever the model's dtype is."""


def layer_tensors(config: ModelConfig, *, with_experts: bool) -> list[SavedTensor]:
    """Of a decoder layer with or without experts, without recomputation."""
    sizes = dims(config)
    attention = _latent_attention(sizes) if family_of(config).is_latent else _grouped_attention(sizes, _norms_heads(config))
    tensors = [
        SavedTensor("input of the attention's norm", sizes["hidden"], "hidden"),
        SavedTensor(_NORMED, sizes["hidden"], "hidden"),
        *attention,
        SavedTensor("sums of the softmax", sizes["heads"], "heads", in_float32=True),
        SavedTensor("input of the MLP's norm", sizes["hidden"], "hidden"),
        SavedTensor("normed, input of the MLP", sizes["hidden"], "hidden"),
    ]
    if not with_experts:
        return [*tensors, *_gated_mlp("MLP", sizes["ffn"])]
    chosen = text_config(config).num_experts_per_tok
    return [
        *tensors,
        SavedTensor("scores of the router", 2 * sizes["experts"], "hidden", in_float32=True),
        SavedTensor("copies sent to the experts", chosen * sizes["hidden"], "gathered"),
        *_gated_mlp("experts", chosen * sizes["expert_ffn"]),
        *(_gated_mlp("shared experts", sizes["shared_ffn"]) if sizes["shared_ffn"] else ()),
    ]


def _norms_heads(config: ModelConfig) -> bool:
    """Whether each head's query and key has a norm."""
    return any(rule.megatron.startswith("self_attention.q_layernorm.") for rule in family_of(config).layer(config, 0))


def _grouped_attention(sizes: Mapping[str, int], norms_heads: bool) -> list[SavedTensor]:
    # The projection's output has the heads of a group side by side, so a norm over heads keeps a copy.
    normed = [SavedTensor("queries and keys before their norms", sizes["q"] + sizes["kv"], "heads")] if norms_heads else []
    return [
        # The values are a view of it, so it stays whole; the queries and keys are copied when they are rotated.
        SavedTensor("queries, keys, values", sizes["q"] + 2 * sizes["kv"], "heads"),
        *normed,
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
    config: ModelConfig, parallel: ParallelConfig, recompute: Recompute, *, with_experts: bool, number_bytes: int = 2
) -> tuple[float, float]:
    """(kept until the backward pass, computed again and held during this layer's), bytes per token of the pack.

    ``number_bytes``: of a number in the model's dtype.
    """

    def total(tensors: Iterable[SavedTensor]) -> float:
        return sum(_bytes(tensor, parallel, number_bytes) for tensor in tensors)

    tensors = layer_tensors(config, with_experts=with_experts)
    whole = total(tensors)
    if recompute is Recompute.full:
        return total([SavedTensor("input of the layer", dims(config)["hidden"], "hidden")]), whole
    if recompute is Recompute.selective:
        again = total(tensor for tensor in tensors if _is_recomputed(tensor, config))
        return whole - again, again
    return whole, 0.0


def _is_recomputed(tensor: SavedTensor, config: ModelConfig) -> bool:
    """Of ``Recompute.selective`` (models/hf/megatron_config.py); only latent attention has a first norm of its own."""
    return tensor.name in _RECOMPUTED or (tensor.name == _NORMED and family_of(config).is_latent)


def head_bytes(
    config: ModelConfig, parallel: ParallelConfig, *, with_logits: bool, number_bytes: int = 2
) -> float:
    """After the last layer, bytes per token of the pack: the norm and, where they are kept, logits in both precisions."""
    sizes = dims(config)
    norm = SavedTensor("input and output of the last norm", 2 * sizes["hidden"], "hidden")
    logits = (4 + number_bytes) * sizes["vocab"] / parallel.tensor_parallel_size if with_logits else 0.0
    return _bytes(norm, parallel, number_bytes) + logits


def chunked_logits_bytes(
    config: ModelConfig, parallel: ParallelConfig, *, tokens: int, number_bytes: int = 2, updates: bool = True
) -> float:
    """What the policy's head holds while it turns the hidden states of a pack of ``tokens`` into log-probs, on the last stage.

    Logits exist for a chunk of tokens, in float32 (``models/logprobs.py``): six of their size at a time in the backward
    pass, two in the forward pass. The backward pass has the head's gradient twice in float32 and once as the model keeps it.
    """
    sizes, tp = dims(config), parallel.tensor_parallel_size
    chunk = min(tokens, max(_TOKENS_PER_CHUNK, _LOGITS_PER_CHUNK // sizes["vocab"]))
    logits = 4 * chunk * sizes["vocab"] / tp
    # Of all tokens, gathered from the tensor-parallel ranks, and those of them that train; their gradient comes on top.
    hidden = number_bytes * sizes["hidden"] * tokens / parallel.context_parallel_size
    if not updates:
        return 2 * logits + 2 * hidden
    return 6 * logits + 3 * hidden + (8 + number_bytes) * sizes["vocab"] * sizes["hidden"] / tp


def _bytes(tensor: SavedTensor, parallel: ParallelConfig, number_bytes: int) -> float:
    tp = parallel.tensor_parallel_size
    shared_by = {
        "hidden": tp if parallel.sequence_parallel else 1,
        "heads": tp,
        "gathered": tp / expert_tensor_size(parallel),
    }[tensor.spread]
    return tensor.width * (4 if tensor.in_float32 else number_bytes) / shared_by / parallel.context_parallel_size
