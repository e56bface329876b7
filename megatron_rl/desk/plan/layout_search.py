"""Lists the layouts of a model over a number of ranks that a plan examines, and the reasons against a layout. Pure.

Tensor parallelism stays within a node. An expert is whole, or split like the other matrices. Layers are split as evenly as possible;
the stages with the embedding and the head are the first to get one layer less. Any number of stages that divides the ranks is listed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.layout import expert_tensor_size, first_chunk_layers, ranks_of_replica, unsplit_problem
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.families.family import ModelConfig, family_of
from megatron_rl.families.model_facts import as_config, dims, has_linear_attention, split_sizes, text_config
from megatron_rl.families.vision_encoder import num_deepstack

_MOST_CONTEXTS = 32


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
    needs_sequence_parallel: bool = False
    """True if tensor parallelism needs sequence parallelism."""
    unsplit: Mapping[str, str] = field(default_factory=dict)
    """``Family.unsplit``."""
    linear_heads: int = 0
    """Key heads of linear attention, which tensor and context parallelism split; 0 without linear attention."""


@dataclass(frozen=True)
class LayoutFamily:
    """The common properties of layouts that differ only by tensor and context parallelism."""

    stages: int
    """Number of pipeline stages."""
    experts: int = 1
    """Expert-parallel size."""
    whole: bool = True
    """True if each expert is on a single rank while other matrices are split."""
    chunks: int = 1
    """Number of chunks per pipeline rank."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ParallelConfig that keep their values."""


def shape_of(facts: ModelConfig) -> ModelShape:
    sizes, vision = dims(facts), getattr(facts, "vision_config", None)
    images = num_deepstack(as_config(vision) if isinstance(vision, dict) else vision) if vision else 0
    shared = tuple(split_sizes(facts).items())
    needs_sequence = bool(sizes["experts"]) or family_of(facts).is_latent or has_linear_attention(facts)
    linear = sizes["linear_key_heads"] if has_linear_attention(facts) else 0
    layers, unsplit = text_config(facts).num_hidden_layers, family_of(facts).unsplit
    return ModelShape(layers, sizes["experts"], sizes["expert_ffn"], shared, images, needs_sequence, unsplit, linear)


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors of ``number`` up to ``most``, increasing."""
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def expert_sizes(shape: ModelShape, num_ranks: int) -> Sequence[int]:
    """Return the expert-parallel sizes, increasing."""
    return divisors(shape.experts, num_ranks) or [1]


def tensor_sizes(num_ranks: int, per_machine: int) -> list[int]:
    """Return the tensor-parallel sizes within a node, increasing: groups of one size fill each node."""
    return divisors(num_ranks if num_ranks % per_machine else per_machine, per_machine)


def context_sizes(num_ranks: int) -> list[int]:
    return divisors(num_ranks, _MOST_CONTEXTS)


def layouts(
    shape: ModelShape, kind: LayoutFamily, num_ranks: int, pairs: Iterable[tuple[int, int]]
) -> Iterator[ParallelConfig]:
    """Yield the layouts of a family, those with the least splitting first, including refused ones.

    ``pairs``: (tensor-parallel size, context-parallel size) of each layout.
    """
    for tp, cp in sorted(pairs, key=lambda pair: (math.prod(pair), pair[1])):
        if kind.whole and kind.experts == 1 and tp > 1 and shape.experts:
            continue  # without expert parallelism Megatron splits experts like the other matrices
        sizes = {
            "tensor_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "context_parallel_size": cp,
            "pipeline_parallel_size": kind.stages,
            "virtual_pipeline_size": kind.chunks,
            "pipeline_layers": cut_layers(shape.layers, kind.stages * kind.chunks),
            "expert_parallel_size": kind.experts,
            "expert_tensor_parallel_size": 1 if kind.whole and kind.experts > 1 else 0,
        }
        yield ParallelConfig(num_ranks=num_ranks, **{**sizes, **kind.pinned})


def cut_layers(num_layers: int, num_chunks: int) -> list[int]:
    """Return parallel.pipeline_layers; empty if all chunks have the same number of layers."""
    least, more = divmod(num_layers, num_chunks)
    if not more:
        return []
    # A chunk with the embedding or the head has work in addition to its layers.
    order = [*range(1, num_chunks - 1), 0, num_chunks - 1][:more]
    return [least + (chunk in order) for chunk in range(num_chunks)]


def layout_refusal(shape: ModelShape, parallel: ParallelConfig) -> str:
    """Reason why the model does not fit this layout over ``parallel.num_ranks`` ranks, or an empty string.

    Many layouts share a reason, so that refusals can be counted. The rules are those of ``config.layout`` for sizes of at least 1.
    """
    return next((reason for is_broken, reason in _rules(shape, parallel) if is_broken), "")


def _rules(shape: ModelShape, parallel: ParallelConfig) -> Iterator[tuple[bool, str]]:
    """Yield (True if the layout breaks the rule, reason); a rule may rely on those before it."""
    tp, pp, ep = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.expert_parallel_size
    expert_tp, vpp = expert_tensor_size(parallel), parallel.virtual_pipeline_size
    num_chunks, layers = pp * vpp, parallel.pipeline_layers
    yield num_chunks > shape.layers, "fewer layers than pipeline stages"
    if layers:
        matches = (len(layers), sum(layers)) == (num_chunks, shape.layers) and min(layers) > 0
        yield not matches, "pipeline_layers do not match the layers and the stages"
    yield not layers and shape.layers % num_chunks > 0, "stages do not divide the layers"
    yield vpp > 1 and pp == 1, "VPP needs a pipeline"
    for name, size in shape.shared:
        yield size % tp > 0, f"TP does not divide {name}"
    needs_sequence = tp == 1 or shape.needs_sequence_parallel
    yield needs_sequence and parallel.sequence_parallel != (tp > 1), "sequence parallelism needs TP; experts with TP need it"
    yield parallel.num_ranks % ranks_of_replica(parallel) > 0, "ranks do not divide by TP x CP x PP"
    yield (parallel.num_ranks // pp) % (ep * expert_tp) > 0, "ranks of a stage do not divide by EP x ETP"
    yield ep == 1 and expert_tp != tp, "ETP differs from TP without EP"
    yield ep > 1 and (not shape.experts or shape.experts % ep > 0), "EP does not divide the experts"
    yield shape.experts > 0 and shape.expert_ffn % expert_tp > 0, "ETP does not divide moe_intermediate_size"
    yield unsplit_problem(parallel, shape.unsplit) is not None, "the family has no such split of experts or contexts"
    few = first_chunk_layers(parallel, shape.layers) < shape.layers_with_images
    over_heads = tp * parallel.context_parallel_size
    yield shape.linear_heads % over_heads > 0, "TP x CP does not divide linear_num_key_heads"
    yield few, "the first stage has too few layers for the image features"
