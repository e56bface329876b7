"""Lists the layouts of a model over a number of ranks that a plan examines, and the reasons against a layout. Pure.

Tensor parallelism stays on one machine; an expert is whole or shared like the other matrices; layers are cut as evenly as they
can be, and the stages with the embedding and the head are the first to have one less.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_rl.config.layout import first_chunk_layers
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.model_facts import as_config, dims, split_sizes, text_config
from megatron_rl.families.vision_encoder import num_deepstack

STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
_CONTEXTS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class ModelShape:
    """The model's properties that determine its possible layouts."""

    layers: int
    experts: int
    """Number of experts per layer; 0 if there are none."""
    expert_ffn: int
    shared: tuple[tuple[str, int], ...]
    """Sizes that tensor parallelism splits."""
    layers_with_images: int
    """Number of layers with images, in the first stage at least."""


@dataclass(frozen=True)
class LayoutFamily:
    """The common properties of layouts that differ only by tensor and context parallelism."""

    stages: int
    """Number of pipeline stages."""
    experts: int = 1
    """Expert-parallel size."""
    whole: bool = True
    """True if each expert is on a single rank while other matrices are split."""
    stride: int = 8
    """Most ranks over which tensors and contexts are split."""


def shape_of(facts: ModelConfig) -> ModelShape:
    sizes, vision = dims(facts), getattr(facts, "vision_config", None)
    images = num_deepstack(as_config(vision) if isinstance(vision, dict) else vision) if vision else 0
    shared = tuple(split_sizes(facts).items())
    return ModelShape(text_config(facts).num_hidden_layers, sizes["experts"], sizes["expert_ffn"], shared, images)


def expert_sizes(shape: ModelShape, num_ranks: int) -> Sequence[int]:
    """Return the expert-parallel sizes, increasing."""
    return [size for size in range(1, min(num_ranks, shape.experts) + 1) if shape.experts % size == 0] or [1]


def layouts(shape: ModelShape, kind: LayoutFamily, num_ranks: int, per_machine: int) -> Iterator[ParallelConfig]:
    """Yield the layouts of a family, those with the least splitting first, including refused ones."""
    tensors = [2**power for power in range(per_machine.bit_length())]
    pairs = [(tp, cp) for tp, cp in product(tensors, _CONTEXTS) if tp <= per_machine and tp * cp <= kind.stride]
    for tp, cp in sorted(pairs, key=lambda pair: (math.prod(pair), pair[1])):
        if kind.whole and kind.experts == 1 and tp > 1 and shape.experts:
            continue  # without expert parallelism Megatron shares them like the others
        yield ParallelConfig(
            num_ranks=num_ranks,
            tensor_parallel_size=tp,
            sequence_parallel=tp > 1,
            context_parallel_size=cp,
            pipeline_parallel_size=kind.stages,
            pipeline_layers=cut_layers(shape.layers, kind.stages),
            expert_parallel_size=kind.experts,
            expert_tensor_parallel_size=1 if kind.whole and kind.experts > 1 else 0,
        )


def cut_layers(num_layers: int, num_chunks: int) -> list[int]:
    """Return parallel.pipeline_layers; empty if all chunks have the same number of layers."""
    least, more = divmod(num_layers, num_chunks)
    if not more:
        return []
    # A chunk with the embedding or the head has work in addition to its layers.
    order = [*range(1, num_chunks - 1), 0, num_chunks - 1][:more]
    return [least + (chunk in order) for chunk in range(num_chunks)]


def layout_refusal(shape: ModelShape, parallel: ParallelConfig) -> str:
    """Why the model cannot be laid out so over ``parallel.num_ranks`` ranks, in words that many layouts share; empty if it can.

    The laws of ``config.layout`` and of Megatron's models, asked of layouts of this file alone, which keep the others.
    """
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    replica, expert_tp = tp * pp * parallel.context_parallel_size, parallel.expert_tensor_parallel_size or tp
    if pp * parallel.virtual_pipeline_size > shape.layers:
        return "fewer layers than pipeline stages"
    if name := next((name for name, size in shape.shared if size % tp), ""):
        return f"TP does not divide {name}"
    if parallel.num_ranks % replica:
        return "ranks do not divide by TP x CP x PP"
    if (parallel.num_ranks // pp) % (parallel.expert_parallel_size * expert_tp):
        return "ranks of a stage do not divide by EP x ETP"
    if shape.experts and shape.expert_ffn % expert_tp:
        return "ETP does not divide moe_intermediate_size"
    if first_chunk_layers(parallel, shape.layers) < shape.layers_with_images:
        return "the first stage has fewer layers than take image features"
    return ""
