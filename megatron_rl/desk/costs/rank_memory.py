"""Bytes that one model needs on a trainer rank. Pure.

Each rank stores weights and gradients of its own parameters. The optimizer state is sharded over the ranks that
have the same parameters (ZeRO-1, arXiv 1910.02054): the data- and context-parallel ranks; for experts, the ranks
of a stage with the same experts. These three figures are exact: tests compare them with the parameters of ranks
that Megatron has built. Megatron's buffers pad each tensor to 64 values, and each buffer to 128 per rank; that
padding is not counted.

Activations are the tensors that a layer saves per token for the backward pass. Their table follows Megatron Core
0.16 with Transformer Engine's layers, flash attention and the fused SwiGLU: a linear layer saves its input, a norm its
input, flash attention its queries, keys, values and output. Short-lived buffers (gradients, collectives) are not
counted. The load of the experts is assumed to be even.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.config.layout import expert_tensor_size
from megatron_rl.config.schema import (
    Dtype,
    LoraConfig,
    Moments,
    OptimizerConfig,
    ParallelConfig,
    Recompute,
    VisionConfig,
)
from megatron_rl.desk.costs.parameter_counts import (
    ParameterCount,
    adapter_parameters,
    embedding_parameters,
    encoder_parameters,
    head_parameters,
    layer_parameters,
)
from megatron_rl.families.family import ModelConfig, family_of
from megatron_rl.families.model_facts import LayerKind, cached_by_content, dims, layer_kinds, text_config

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


def layer_tensors(config: ModelConfig, *, with_experts: bool, is_linear: bool = False) -> list[SavedTensor]:
    """Tensors that a decoder layer with or without experts, with softmax or linear attention, saves when nothing is recomputed."""
    sizes, softmax_sums = dims(config), SavedTensor("sums of the softmax", dims(config)["heads"], "heads", in_float32=True)
    if is_linear:
        attention = _linear_attention(sizes)
    elif family_of(config).is_latent:
        attention = [*_latent_attention(sizes), softmax_sums]
    else:
        attention = [*_grouped_attention(sizes, _norms_heads(config)), softmax_sums]
    tensors = [
        SavedTensor("input of the attention's norm", sizes["hidden"], "hidden"),
        SavedTensor(_NORMED, sizes["hidden"], "hidden"),
        *attention,
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
    kinds = layer_kinds(config)
    softmax = next((index for index, kind in enumerate(kinds) if not kind.is_linear), 0)
    return any(rule.megatron.startswith("self_attention.q_layernorm.") for rule in family_of(config).layer(config, softmax))


def _grouped_attention(sizes: Mapping[str, int], norms_heads: bool) -> list[SavedTensor]:
    # The projection output stores the heads of a group side by side, so a norm over heads saves a copy.
    normed = [SavedTensor("queries and keys before their norms", sizes["q"] + sizes["kv"], "heads")] if norms_heads else []
    gates = sizes.get("gated_q", sizes["q"]) - sizes["q"]
    return [
        # The values (and the gates) are a view of this tensor, so all of it stays; queries and keys are copied when they are rotated.
        SavedTensor("queries, keys, values", sizes["q"] + gates + 2 * sizes["kv"], "heads"),
        *normed,
        SavedTensor("rotated queries and keys", sizes["q"] + sizes["kv"], "heads"),
        SavedTensor("attended values", sizes["q"], "heads"),
        *([SavedTensor("gates and gated values", 2 * gates, "heads")] if gates else []),
    ]


def _linear_attention(sizes: Mapping[str, int]) -> list[SavedTensor]:
    """Tensors that Gated DeltaNet saves, read from Megatron Core 0.19 and flash-linear-attention; not measured."""
    heads, keys, values = sizes["linear_heads"], sizes["linear_k"], sizes["linear_v"]
    # Queries and keys are repeated for the value heads that share them.
    repeated = heads * sizes["linear_key_dim"]
    return [
        # The convolution's input and the gate are views of this tensor.
        SavedTensor("output of the input projection", 2 * keys + 2 * values + 2 * heads, "heads"),
        SavedTensor("convolved queries, keys, values", 2 * keys + values, "heads"),
        SavedTensor("normed queries and keys", 2 * keys, "heads"),
        SavedTensor("repeated queries and keys, values", 2 * repeated + values, "heads"),
        SavedTensor("systems of the chunks", 64 * heads, "heads"),
        SavedTensor("decays and steps", 2 * heads, "heads", in_float32=True),
        SavedTensor("output of the delta rule, gate, gated norm", 3 * values, "heads"),
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
    config: ModelConfig,
    parallel: ParallelConfig,
    recompute: Recompute,
    *,
    with_experts: bool,
    is_linear: bool = False,
    number_bytes: int = 2,
) -> tuple[float, float]:
    """Returns (bytes saved until the backward pass, bytes recomputed during it), per token of the micro-batch.

    ``number_bytes``: bytes of a value in the model's dtype.
    """

    def total(tensors: Iterable[SavedTensor]) -> float:
        return sum(_bytes(tensor, parallel, number_bytes) for tensor in tensors)

    tensors = layer_tensors(config, with_experts=with_experts, is_linear=is_linear)
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


class ParameterBytes(NamedTuple):
    """Bytes per parameter that a model takes. The defaults are for bfloat16 weights and Adam with all state in float32."""

    weight: int = 2
    gradient: int = 4
    """Bytes of gradient; 0 for a model that does not train (a reference)."""
    optimizer: int = 12
    """Bytes of optimizer state: float32 main weights and two moments."""
    train_encoder: bool = True
    """False if the vision encoder is frozen; frozen parts have neither gradient nor optimizer state."""
    train_adapter: bool = True
    rank: int = 0
    """Rank of low-rank adapters, which train instead of the weights; 0: none."""
    targets: tuple[str, ...] = ()
    """Modules with an adapter (``families/adapters.py``)."""
    shares: bool = False
    """True if the model has adapters (and a critic its head) alone: its other weights are those of another model."""

    @property
    def least(self) -> "ParameterBytes":
        """Bytes that every parameter takes at least: with adapters no gradient and no state."""
        return self._replace(gradient=0, optimizer=0) if self.rank else self


def parameter_bytes(
    dtype: Dtype, optimizer: OptimizerConfig | None, vision: VisionConfig, lora: LoraConfig | None = None
) -> ParameterBytes:
    """Bytes per parameter of an engine with this configuration (``training/engine.py``)."""
    weight = 4 if dtype is Dtype.float32 else 2
    if optimizer is None:
        return ParameterBytes(weight, 0, 0)
    adapters = (lora.rank, tuple(lora.targets)) if lora is not None and lora.rank else (0, ())
    moments = 2 * (2 if optimizer.moments is Moments.bfloat16 else 4)
    # A float32 model needs no separate main weights: the optimizer updates its weights in place.
    return ParameterBytes(weight, 4, moments + (0 if weight == 4 else 4), vision.train_encoder, vision.train_adapter, *adapters)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each rank of a pipeline stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class PassSettings:
    """Describes how micro-batches pass through the model."""

    tokens: int
    """Tokens of one micro-batch before the ranks of a replica split it."""
    num_packs: int = 2**31
    """Micro-batches between two updates, an upper limit of those in the pipeline. The default is more than it has stages."""
    recompute: Recompute = Recompute.none
    keeps_logits: bool = False
    """True if the logits of all tokens exist at the same time, as in Megatron's own loss; this trainer chunks them."""
    number_bytes: int = 2
    """Bytes of an activation value in the model's dtype."""
    forward_only: bool = False
    """True if nothing is saved for a backward pass: memory is then the tensors of one layer at a time."""


@cached_by_content
def memory_by_rank(
    config: ModelConfig,
    parallel: ParallelConfig,
    passes: PassSettings,
    *,
    num_ranks: int,
    is_critic: bool = False,
    states: ParameterBytes | None = None,
) -> list[RankMemory]:
    """Memory of each pipeline rank, in order; all ranks of a stage need the same.

    ``parallel`` must fit the model and ``num_ranks`` (``config.layout``). Not counted: fragmentation of PyTorch's
    allocator, buffers of collectives (NCCL takes about 1 to 10 GB, more with many groups), and images.
    """
    stages, states = _layers_of_ranks(parallel, text_config(config).num_hidden_layers), states or ParameterBytes()
    data = num_ranks / (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    of_expert = num_ranks / (parallel.pipeline_parallel_size * parallel.expert_parallel_size * expert_tensor_size(parallel))
    saved = _bytes_by_kind(config, parallel, passes) if passes.tokens else {}
    memory = []
    for rank, (chunks, held) in enumerate(zip(stages, _parameters_of_ranks(config, parallel, is_critic), strict=True)):
        kinds, (dense, expert) = _kinds(layer_kinds(config), chunks), _on_rank(held, parallel)
        trained, trained_expert = (dense - (_frozen(config, states) if rank == 0 else 0)) if states.gradient else 0, expert
        if states.rank:
            trained, trained_expert = _adapters(config, parallel, states, chunks)
            dense, expert = dense + trained, expert + trained_expert
            trained += dims(config)["hidden"] if is_critic and rank == len(stages) - 1 else 0
            dense, expert = (trained, trained_expert) if states.shares else (dense, expert)
        memory.append(
            RankMemory(
                weights=states.weight * (dense + expert),
                gradients=states.gradient * (trained + trained_expert),
                optimizer=states.optimizer * (trained / data + trained_expert / of_expert),
                activations=_activations(config, parallel, passes, rank, kinds, saved) if passes.tokens else 0.0,
            )
        )
    return memory


def _parameters_of_ranks(config: ModelConfig, parallel: ParallelConfig, is_critic: bool) -> list[ParameterCount]:
    """Parameters per pipeline rank: its layers, plus the embedding on the first rank and the head on the last."""
    stages, has = _layers_of_ranks(parallel, text_config(config).num_hidden_layers), layer_kinds(config)
    of_kind = dict(zip(has, layer_parameters(config), strict=True))  # all layers of a kind have equal counts
    tp, last = parallel.tensor_parallel_size, len(stages) - 1
    held = [[of_kind[kind].times(number) for kind, number in _kinds(has, chunks).items()] for chunks in stages]
    held[0].append(embedding_parameters(config, tensor_parallel_size=tp))
    head = head_parameters(config, is_critic=is_critic, tensor_parallel_size=tp)
    # On a single stage a tied output layer is the embedding itself.
    is_same = config.tie_word_embeddings and not is_critic and last == 0
    held[last].append(ParameterCount(replicated=head.replicated) if is_same else head)
    return [ParameterCount.sum(parts) for parts in held]


def _adapters(
    config: ModelConfig, parallel: ParallelConfig, states: ParameterBytes, chunks: list[range]
) -> tuple[float, float]:
    """Number of (dense, expert) parameters of the adapters of a stage's layers on one rank."""
    by_layer = adapter_parameters(config, states.targets, states.rank)
    return _on_rank(ParameterCount.sum(by_layer[index] for chunk in chunks for index in chunk), parallel)


def _frozen(config: ModelConfig, states: ParameterBytes) -> int:
    """Number of parameters of the vision tower and its adapter that are not trained."""
    tower, adapter = encoder_parameters(config)
    return tower * (not states.train_encoder) + adapter * (not states.train_adapter)


def _on_rank(parameters: ParameterCount, parallel: ParallelConfig) -> tuple[float, float]:
    """Number of (dense, expert) parameters on one rank."""
    dense = parameters.split / parallel.tensor_parallel_size + parameters.replicated
    return dense, parameters.experts / (parallel.expert_parallel_size * expert_tensor_size(parallel))


def _layers_of_ranks(parallel: ParallelConfig, num_layers: int) -> list[list[range]]:
    """Layers of each chunk, per pipeline rank."""
    pipeline, virtual = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    number, given = pipeline * virtual, parallel.pipeline_layers
    ends = [sum(given[: index + 1]) if given else num_layers * (index + 1) // number for index in range(number)]
    chunks = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [chunks[rank::pipeline] for rank in range(pipeline)]


def _kinds(has: list[LayerKind], chunks: list[range]) -> Counter[LayerKind]:
    """Number of layers of each kind."""
    return Counter(itertools.chain.from_iterable(has[chunk.start : chunk.stop] for chunk in chunks))


def _bytes_by_kind(
    config: ModelConfig, parallel: ParallelConfig, passes: PassSettings
) -> dict[LayerKind, tuple[float, float]]:
    """Bytes per token (saved until the backward pass, recomputed during it) of a layer of each kind."""
    recompute = Recompute.full if passes.forward_only else passes.recompute
    size = passes.number_bytes
    return {
        kind: layer_bytes(
            config, parallel, recompute, with_experts=kind.has_experts, is_linear=kind.is_linear, number_bytes=size
        )
        for kind in set(layer_kinds(config))
    }


def _activations(
    config: ModelConfig,
    parallel: ParallelConfig,
    passes: PassSettings,
    rank: int,
    kinds: Counter[LayerKind],
    by_kind: dict[LayerKind, tuple[float, float]],
) -> float:
    """Peak bytes of activations on a rank of this stage: of the micro-batches in progress, of recomputation, and of the head.

    ``kinds``: number of the stage's layers of each kind. ``by_kind``: from ``_bytes_by_kind``.
    """
    kept = sum(number * by_kind[kind][0] for kind, number in kinds.items())
    again = max(by_kind[kind][1] for kind in kinds)
    if passes.forward_only:
        return again * passes.tokens
    started = packs_in_progress(parallel, rank, passes.num_packs)
    per_token = kept / parallel.virtual_pipeline_size * started + again
    if rank == parallel.pipeline_parallel_size - 1:
        per_token += head_bytes(config, parallel, with_logits=passes.keeps_logits, number_bytes=passes.number_bytes)
    return per_token * passes.tokens


def packs_in_progress(parallel: ParallelConfig, rank: int, num_packs: int) -> int:
    """Peak number of forward passes on a pipeline stage whose backward pass is still to come, in an update.

    A micro-batch counts once for each of the stage's model chunks that has started it.
    """
    pipeline, virtual = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    # 1F1B: stage r has started p - r micro-batches when the first one returns. Interleaved stages start p micro-batches
    # of each chunk but the last, and two more for each later stage (arXiv 2104.04473).
    started = pipeline - rank if virtual == 1 else 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1
    return min(started, num_packs * virtual)
