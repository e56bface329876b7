"""Which ranks hold a parameter, under the tables' names: pipeline stages, and within one the splits of experts."""

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
    """By pipeline stage, its parameters' dtypes by ``any_expert`` of their names; collective over the stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    held: list[dict[str, torch.dtype]] = [{} for _ in range(group.size())]
    # Pipeline peers hold the same experts, which may not be those of an entry: a stage has all of a layer's or none.
    dist.all_gather_object(held, {any_expert(name): p.dtype for name, p in parameters.items()}, group=group)
    return held


def stage_of(entry: Entry, held: Sequence[dict[str, torch.dtype]]) -> int:
    key = any_expert(entry.megatron)
    for stage, names in enumerate(held):
        if key in names:
            return stage
    raise WeightsError(f"no pipeline stage holds Megatron's parameter {entry.megatron}")


def first_rank_of(stage: int) -> int:
    """The first rank of pipeline stage ``stage``, by Megatron's order of ranks: stages are the slowest."""
    return stage * (dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size())


def holders(entry: Entry, stage: int, sizes: Dims) -> Sequence[int]:
    """The ranks of ``stage`` that hold ``entry`` or a shard of it."""
    first, expert = first_rank_of(stage), expert_of(entry.megatron)
    ranks = range(first, first_rank_of(stage + 1))
    if expert is None:
        return ranks
    num_shards = parallel_state.get_expert_tensor_parallel_world_size()
    num_splits = parallel_state.get_expert_model_parallel_world_size()
    split = expert // (sizes["experts"] // num_splits)
    return [rank for rank in ranks if (rank - first) // num_shards % num_splits == split]


def expert_of(name: str) -> int | None:
    """The expert that a parameter (by the tables' name) belongs to; None for what all ranks share."""
    match = _EXPERT.search(name)
    return int(match[2]) if match else None


def any_expert(name: str) -> str:
    """The name with a star for the expert: ranks hold the same parameters of different experts."""
    return _EXPERT.sub(r"\1*\3", name)


def named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of this rank under the tables' names: layers and experts numbered through the whole model."""
    for chunk in chunks:
        model = unwrap(chunk)
        numbers = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
        num_experts = model.config.num_moe_experts or 0
        first_expert = (
            num_experts // model.config.expert_model_parallel_size * parallel_state.get_expert_model_parallel_rank()
        )
        # The routers' biases are buffers to Megatron, and weights to a checkpoint.
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias"))
        for name, parameter in itertools.chain(model.named_parameters(), biases):
            name = canonical_name(name)
            match = re.match(r"decoder\.layers\.(\d+)\.(.+)", name)
            if match:
                name = f"decoder.layers.{numbers[int(match[1])]}.{match[2]}"
            expert = expert_of(name)
            if expert is not None:
                name = _EXPERT.sub(rf"\g<1>{expert + first_expert}\3", name)
            yield name, parameter
