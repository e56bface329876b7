"""Bytes that a trainer rank needs for one model. Pure.

Mixed precision with Megatron's distributed optimizer: weights in bfloat16 (2 bytes a parameter), gradients in float32 (4),
and float32 weights with Adam's two moments (12), sharded over the ranks that hold the same parameters (ZeRO-1,
arXiv 1910.02054): the data- and context-parallel ranks, for experts those of a stage that hold the same experts.
"""

from collections import Counter
from dataclasses import dataclass

from megatron_rl.config.layout import expert_tensor_size
from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.families.facts import has_experts, text_config
from megatron_rl.families.family import ModelConfig
from megatron_rl.planning.activations import head_bytes, layer_bytes
from megatron_rl.planning.counts import Parameters, embedding_parameters, head_parameters, layer_parameters

_WEIGHT_BYTES, _GRADIENT_BYTES, _OPTIMIZER_BYTES = 2, 4, 12


@dataclass(frozen=True)
class RankMemory:
    """Of each rank of a pipeline stage [bytes]. A model that is only read (a reference) needs its weights alone."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Passes:
    """How packs go through the model."""

    tokens: int
    """Of one pack, the whole of what the ranks of a replica share."""
    num_packs: int = 2**31
    """Packs between two updates: a pipeline keeps no more of them at once. The default: more than it has stages."""
    recompute: Recompute = Recompute.none
    keeps_logits: bool = False
    """Whether the logits of all tokens exist at once, as in Megatron's own loss; this trainer makes them in chunks."""


def memory_by_rank(
    config: ModelConfig, parallel: ParallelConfig, passes: Passes, *, num_ranks: int, is_critic: bool = False
) -> list[RankMemory]:
    """One entry per pipeline rank, in their order; the ranks of a stage are alike.

    ``parallel`` fits the model and ``num_ranks`` (``config.layout``). Not counted: what PyTorch's allocator wastes, buffers
    of collectives (NCCL takes some 1 to 10 GB, more with many groups), and images.
    """
    layers, stages = layer_parameters(config), _layers_of_ranks(parallel, text_config(config).num_hidden_layers)
    pipeline = parallel.pipeline_parallel_size
    data = num_ranks / (parallel.tensor_parallel_size * pipeline)
    experts = num_ranks / (pipeline * parallel.expert_parallel_size * expert_tensor_size(parallel))
    found = []
    for rank, chunks in enumerate(stages):
        held = [layers[layer] for chunk in chunks for layer in chunk]
        held += [embedding_parameters(config)] if rank == 0 else []
        if rank == pipeline - 1:
            # In one stage a tied output layer is the embedding itself.
            is_same = config.tie_word_embeddings and not is_critic and pipeline == 1
            head = head_parameters(config, is_critic=is_critic)
            held.append(Parameters(replicated=head.replicated) if is_same else head)
        dense, expert = _on_rank(Parameters.sum(held), parallel)
        found.append(
            RankMemory(
                weights=_WEIGHT_BYTES * (dense + expert),
                gradients=_GRADIENT_BYTES * (dense + expert),
                optimizer=_OPTIMIZER_BYTES * (dense / data + expert / experts),
                activations=_activations(config, parallel, passes, rank, chunks) if passes.tokens else 0.0,
            )
        )
    return found


def _on_rank(parameters: Parameters, parallel: ParallelConfig) -> tuple[float, float]:
    """(dense, expert) parameters on one rank."""
    dense = parameters.split / parallel.tensor_parallel_size + parameters.replicated
    return dense, parameters.experts / (parallel.expert_parallel_size * expert_tensor_size(parallel))


def _layers_of_ranks(parallel: ParallelConfig, num_layers: int) -> list[list[range]]:
    """Per pipeline rank: the layers of each of its chunks."""
    pipeline, virtual = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    number, given = pipeline * virtual, parallel.pipeline_layers
    ends = [sum(given[: index + 1]) if given else num_layers * (index + 1) // number for index in range(number)]
    chunks = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [chunks[rank::pipeline] for rank in range(pipeline)]


def _activations(
    config: ModelConfig, parallel: ParallelConfig, passes: Passes, rank: int, chunks: list[range]
) -> float:
    """Bytes at the fullest moment: the packs under way on this stage, and what the backward pass computes again."""
    has = has_experts(config)
    kinds = Counter(has[layer] for chunk in chunks for layer in chunk)
    by_kind = {kind: layer_bytes(config, parallel, passes.recompute, with_experts=kind) for kind in kinds}
    kept = sum(number * by_kind[kind][0] for kind, number in kinds.items())
    again = max(again for _, again in by_kind.values())
    pipeline, virtual = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    # One pack after the other: stage r has started p - r of them when the first comes back. Interleaved stages start
    # p packs of each of their chunks but the last, and two more for each later stage (arXiv 2104.04473).
    started = pipeline - rank if virtual == 1 else 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1
    started = min(started, passes.num_packs * virtual)
    per_token = kept / virtual * started + again
    if rank == pipeline - 1:
        per_token += head_bytes(config, parallel, with_logits=passes.keeps_logits)
    return per_token * passes.tokens


def gibibytes(num_bytes: float) -> float:
    return num_bytes / 1024**3
