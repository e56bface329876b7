"""Finds the ranks that own a parameter (by its name in the tables): its pipeline stage, and within it the expert's ranks."""

import itertools
import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_rl.families.parameters import Entry, canonical_name
from megatron_rl.families.transforms import Dims
from megatron_rl.models.hf.tensor_sources import WeightsError
from megatron_rl.models.layers.gpt import unwrap

_EXPERT = re.compile(r"(\.mlp\.experts\.)(\d+)(\.)")


def dtypes_by_stage(parameters: dict[str, Tensor]) -> list[dict[str, torch.dtype]]:
    """For each pipeline stage, a map from parameter names (after ``any_expert``) to dtypes; collective over the stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    dtypes: list[dict[str, torch.dtype]] = [{} for _ in range(group.size())]
    # Names without the expert's index suffice: a stage has all experts of a layer or none, but a rank has only some.
    dist.all_gather_object(dtypes, {any_expert(name): p.dtype for name, p in parameters.items()}, group=group)
    return dtypes


def stage_of(entry: Entry, held: Sequence[dict[str, torch.dtype]]) -> int:
    """The pipeline stage that has ``entry``; ``held``: result of ``held_by_stage``. Raises WeightsError if none has it."""
    key = any_expert(entry.megatron)
    for stage, names in enumerate(held):
        if key in names:
            return stage
    raise WeightsError(f"no pipeline stage has Megatron's parameter {entry.megatron}")


def first_rank_of(stage: int) -> int:
    """The first rank of pipeline stage ``stage``; in Megatron's order of ranks, a stage's ranks are consecutive."""
    return stage * (dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size())


def holders(entry: Entry, stage: int, sizes: Dims) -> Sequence[int]:
    """The ranks of ``stage`` that have ``entry`` or a shard of it."""
    first, expert = first_rank_of(stage), expert_of(entry.megatron)
    ranks = range(first, first_rank_of(stage + 1))
    if expert is None:
        return ranks
    num_shards = parallel_state.get_expert_tensor_parallel_world_size()
    num_splits = parallel_state.get_expert_model_parallel_world_size()
    split = expert // (sizes["experts"] // num_splits)
    return [rank for rank in ranks if (rank - first) // num_shards % num_splits == split]


def expert_of(name: str) -> int | None:
    """Index of the expert that a parameter (by its name in the tables) belongs to; None if it belongs to no expert."""
    match = _EXPERT.search(name)
    return int(match[2]) if match else None


def any_expert(name: str) -> str:
    """The name with a star for the expert's index, because ranks have the same parameters of different experts."""
    return _EXPERT.sub(r"\1*\3", name)


def named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of this rank by their names in the tables, with layers and experts numbered in the whole model."""
    for chunk in chunks:
        model = unwrap(chunk)
        global_layers = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
        num_experts = model.config.num_moe_experts or 0
        first_expert = (
            num_experts // model.config.expert_model_parallel_size * parallel_state.get_expert_model_parallel_rank()
        )
        # The routers' biases are buffers in Megatron but weights in a checkpoint.
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias"))
        for name, parameter in itertools.chain(model.named_parameters(), biases):
            name = canonical_name(name)
            match = re.match(r"decoder\.layers\.(\d+)\.(.+)", name)
            if match:
                name = f"decoder.layers.{global_layers[int(match[1])]}.{match[2]}"
            expert = expert_of(name)
            if expert is not None:
                name = _EXPERT.sub(rf"\g<1>{expert + first_expert}\3", name)
            yield name, parameter
