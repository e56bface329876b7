"""Activation memory of a training pass: the tensors that a layer saves per token for the backward pass. Pure.

The table follows Megatron Core 0.16 with Transformer Engine's layers, flash attention and the fused SwiGLU: a
linear layer saves its input, a norm its input, flash attention its queries, keys, values and output. Short-lived
buffers (gradients, collectives) are not counted. The load of the experts is assumed to be even.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.config.layout import expert_tensor_size
from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.families.family import ModelConfig, family_of
from megatron_rl.families.model_facts import dims, text_config

_TOKENS_PER_CHUNK = 512
"""Tokens per chunk of logits; equal to the constant in models/logprobs.py."""
_LOGITS_PER_CHUNK = 2**22
"""Upper limit of logits per chunk; equal to the constant in training/engine.py."""
_NORMED = "normed, input of the projections"
_RECOMPUTED = (
    *("queries", "keys and values", "queries and keys with their positions"),
    *("normed, input of the MLP", "gate and up of the MLP", "activated MLP", "activated experts"),
)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saves: ``width`` values per token of the micro-batch."""

    name: str
    width: float
    spread: str
    """Group that shards the tensor: "hidden" (tensor-parallel group, only under sequence parallelism), "heads" (tensor-parallel
    group, always), or "gathered" (tokens at the experts, gathered over the expert-tensor-parallel group)."""
    in_float32: bool = False
    """True if the tensor is float32 regardless of the model's dtype."""


def layer_tensors(config: ModelConfig, *, with_experts: bool) -> list[SavedTensor]:
    """Tensors that a decoder layer with or without experts saves when nothing is recomputed."""
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
    """True if each head's query and key has a norm."""
    return any(rule.megatron.startswith("self_attention.q_layernorm.") for rule in family_of(config).layer(config, 0))


def _grouped_attention(sizes: Mapping[str, int], norms_heads: bool) -> list[SavedTensor]:
    # The projection output stores the heads of a group side by side, so a norm over heads saves a copy.
    normed = [SavedTensor("queries and keys before their norms", sizes["q"] + sizes["kv"], "heads")] if norms_heads else []
    return [
        # The values are a view of this tensor, so all of it stays; queries and keys are copied when they are rotated.
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
    """Returns (bytes saved until the backward pass, bytes recomputed during it), per token of the micro-batch.

    ``number_bytes``: bytes of a value in the model's dtype.
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
    """True if ``Recompute.selective`` drops ``tensor`` (models/hf/megatron_config.py).

    Only latent attention has a separate first norm that can be recomputed.
    """
    return tensor.name in _RECOMPUTED or (tensor.name == _NORMED and family_of(config).is_latent)


def head_bytes(
    config: ModelConfig, parallel: ParallelConfig, *, with_logits: bool, number_bytes: int = 2
) -> float:
    """Bytes per token of the micro-batch after the last layer: the norm, and with ``with_logits`` the logits in both precisions."""
    sizes = dims(config)
    norm = SavedTensor("input and output of the last norm", 2 * sizes["hidden"], "hidden")
    logits = (4 + number_bytes) * sizes["vocab"] / parallel.tensor_parallel_size if with_logits else 0.0
    return _bytes(norm, parallel, number_bytes) + logits


def chunked_logits_bytes(
    config: ModelConfig, parallel: ParallelConfig, *, tokens: int, number_bytes: int = 2, updates: bool = True
) -> float:
    """Peak bytes in the policy's head on the last stage, while it turns hidden states of ``tokens`` tokens into log-probs.

    Logits exist only for a chunk of tokens, in float32 (``models/logprobs.py``): six copies at a time in the
    backward pass, two in the forward pass. The backward pass stores the head's gradient twice in float32 and once
    in the model's dtype.
    """
    sizes, tp = dims(config), parallel.tensor_parallel_size
    chunk = min(tokens, max(_TOKENS_PER_CHUNK, _LOGITS_PER_CHUNK // sizes["vocab"]))
    logits = 4 * chunk * sizes["vocab"] / tp
    # Two copies: all tokens gathered from the tensor-parallel ranks, and the trained ones. Updates add their gradient.
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
