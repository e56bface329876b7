"""Bytes that a trainer rank needs for one model. Pure.

Weights and gradients are on each rank that holds the parameter. The optimizer's state is sharded over the ranks that hold
the same parameters (ZeRO-1, arXiv 1910.02054): the data- and context-parallel ranks, for experts those of a stage that
hold the same experts. These three are exact: tests compare them with the parameters of ranks that Megatron has built.
Megatron's buffers round each tensor up to 64 numbers, and each buffer to 128 of every rank; that is not counted.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.config.layout import expert_tensor_size
from megatron_rl.config.schema import Dtype, Moments, OptimizerConfig, ParallelConfig, Recompute, VisionConfig
from megatron_rl.desk.costs.activations import head_bytes, layer_bytes
from megatron_rl.desk.costs.parameter_counts import (
    ParameterCount,
    embedding_parameters,
    encoder_parameters,
    head_parameters,
    layer_parameters,
)
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.model_facts import cached_by_content, has_experts, text_config


class ParameterBytes(NamedTuple):
    """How a model is kept: bytes of each parameter. The defaults: bfloat16 and Adam, all of it in float32."""

    weight: int = 2
    gradient: int = 4
    """0: it does not train (a reference)."""
    optimizer: int = 12
    """Float32 weights and two moments."""
    train_encoder: bool = True
    """What of a vision encoder does not train has neither gradient nor optimizer state."""
    train_adapter: bool = True


def parameter_bytes(dtype: Dtype, optimizer: OptimizerConfig | None, vision: VisionConfig) -> ParameterBytes:
    """Those of an engine with these settings (``training/engine.py``)."""
    weight = 4 if dtype is Dtype.float32 else 2
    if optimizer is None:
        return ParameterBytes(weight, 0, 0)
    moments = 2 * (2 if optimizer.moments is Moments.bfloat16 else 4)
    # Float32 weights are the optimizer's own.
    return ParameterBytes(weight, 4, moments + (0 if weight == 4 else 4), vision.train_encoder, vision.train_adapter)


@dataclass(frozen=True)
class RankMemory:
    """Of each rank of a pipeline stage [bytes]."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class PassSettings:
    """How packs go through the model."""

    tokens: int
    """Of one pack, the whole of what the ranks of a replica share."""
    num_packs: int = 2**31
    """Packs between two updates: a pipeline keeps no more of them at once. The default: more than it has stages."""
    recompute: Recompute = Recompute.none
    keeps_logits: bool = False
    """Whether the logits of all tokens exist at once, as in Megatron's own loss; this trainer makes them in chunks."""
    number_bytes: int = 2
    """Of an activation in the model's dtype."""
    forward_only: bool = False
    """Nothing is kept for a backward pass: only what one layer holds at a time."""


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
    """One entry per pipeline rank, in their order; the ranks of a stage are alike.

    ``parallel`` fits the model and ``num_ranks`` (``config.layout``). Not counted: what PyTorch's allocator wastes, buffers
    of collectives (NCCL takes some 1 to 10 GB, more with many groups), and images.
    """
    stages, states = _layers_of_ranks(parallel, text_config(config).num_hidden_layers), states or ParameterBytes()
    data = num_ranks / (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    of_expert = num_ranks / (parallel.pipeline_parallel_size * parallel.expert_parallel_size * expert_tensor_size(parallel))
    saved = _bytes_by_kind(config, parallel, passes) if passes.tokens else {}
    found = []
    for rank, (chunks, held) in enumerate(zip(stages, _parameters_of_ranks(config, parallel, is_critic), strict=True)):
        kinds, (dense, expert) = _kinds(has_experts(config), chunks), _on_rank(held, parallel)
        learns = (dense - (_frozen(config, states) if rank == 0 else 0)) if states.gradient else 0
        found.append(
            RankMemory(
                weights=states.weight * (dense + expert),
                gradients=states.gradient * (learns + expert),
                optimizer=states.optimizer * (learns / data + expert / of_expert),
                activations=_activations(config, parallel, passes, rank, kinds, saved) if passes.tokens else 0.0,
            )
        )
    return found


def _parameters_of_ranks(config: ModelConfig, parallel: ParallelConfig, is_critic: bool) -> list[ParameterCount]:
    """Per pipeline rank: whole layers with what stands before the first and after the last one."""
    stages, has = _layers_of_ranks(parallel, text_config(config).num_hidden_layers), has_experts(config)
    of_kind = dict(zip(has, layer_parameters(config), strict=True))  # layers of a kind have the same
    tp, last = parallel.tensor_parallel_size, len(stages) - 1
    held = [[of_kind[kind].times(number) for kind, number in _kinds(has, chunks).items()] for chunks in stages]
    held[0].append(embedding_parameters(config, tensor_parallel_size=tp))
    head = head_parameters(config, is_critic=is_critic, tensor_parallel_size=tp)
    # In one stage a tied output layer is the embedding itself.
    is_same = config.tie_word_embeddings and not is_critic and last == 0
    held[last].append(ParameterCount(replicated=head.replicated) if is_same else head)
    return [ParameterCount.sum(parts) for parts in held]


def _frozen(config: ModelConfig, states: ParameterBytes) -> int:
    """Parameters of a vision encoder that do not train."""
    tower, adapter = encoder_parameters(config)
    return tower * (not states.train_encoder) + adapter * (not states.train_adapter)


def _on_rank(parameters: ParameterCount, parallel: ParallelConfig) -> tuple[float, float]:
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


def _kinds(has: list[bool], chunks: list[range]) -> Counter[bool]:
    """Layers with experts, and without."""
    return Counter(has[layer] for chunk in chunks for layer in chunk)


def _bytes_by_kind(config: ModelConfig, parallel: ParallelConfig, passes: PassSettings) -> dict[bool, tuple[float, float]]:
    """Of a layer with and without experts: ``layer_bytes``."""
    recompute = Recompute.full if passes.forward_only else passes.recompute
    size = passes.number_bytes
    return {
        kind: layer_bytes(config, parallel, recompute, with_experts=kind, number_bytes=size)
        for kind in set(has_experts(config))
    }


def _activations(
    config: ModelConfig,
    parallel: ParallelConfig,
    passes: PassSettings,
    rank: int,
    kinds: Counter[bool],
    by_kind: dict[bool, tuple[float, float]],
) -> float:
    """Bytes at the fullest moment: the packs in progress on this stage, and what the backward pass computes again."""
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
    """Packs that the chunks of a stage have started in an update and not finished, at the fullest moment."""
    pipeline, virtual = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    # One pack after the other: stage r has started p - r of them when the first comes back. Interleaved stages start
    # p packs of each of their chunks but the last, and two more for each later stage (arXiv 2104.04473).
    started = pipeline - rank if virtual == 1 else 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1
    return min(started, num_packs * virtual)
