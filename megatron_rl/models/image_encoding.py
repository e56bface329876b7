"""Prepares the vision encoder of a vision-language model, the unchanged module of transformers, and runs it balanced over ranks.

The encoder turns patches into features of the language model's width, one per image token: features of its last
layer, and in models with DeepStack also features of earlier layers. Images do not attend to each other. The merger
that projects features to that width is called the adapter; the remaining layers are the encoder proper.

The images of a micro-batch are distributed by cost over a group: all ranks of the first pipeline stage. Without
sequence parallelism, tensor-parallel peers need equal gradients, which no collective sums; each peer then does the
same work in its own group.

Invariants: every image is encoded once in the group; each rank gets the features of its own batch, in order; the
gradients of encoder, adapter and text do not depend on the distribution, because parameters are replicated and
Megatron sums their gradients over the group. All ranks of the group, also ranks without images, take part in the
same collectives in every micro-batch.
"""

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from megatron_rl.config.schema import Recompute
from megatron_rl.data.batch import Images, cu_seqlens_of
from megatron_rl.families.vision_encoder import ADAPTER, num_deepstack
from megatron_rl.models.layers.torch_layers import mark_split_gradients

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_encoder(
    encoder: "PreTrainedModel", *, dtype: torch.dtype, recompute: Recompute, sequence_parallel: bool
) -> "PreTrainedModel":
    """Cast the encoder to ``dtype``, move it to this rank's device, and configure it for training."""
    frequencies = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    encoder.to(dtype)
    for name, buffer in frequencies.items():
        # Rotary frequencies keep their precision, as in transformers.
        parent, _, own = name.rpartition(".")
        setattr(encoder.get_submodule(parent), own, buffer)
    if torch.cuda.is_available():
        encoder.cuda()
        if dtype is torch.bfloat16 and importlib.util.find_spec("flash_attn") is not None:
            encoder.set_attn_implementation("flash_attention_2")
    if recompute is Recompute.full:
        _recompute_blocks(encoder)
    mark_split_gradients(encoder, sequence_parallel)
    return encoder


def _recompute_blocks(encoder: "PreTrainedModel") -> None:
    """Enable recomputation of the encoder's blocks.

    ``gradient_checkpointing_enable`` is not used, because it makes the input require a gradient: backward would
    then run through frozen blocks.
    """
    for block in encoder.blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def encode(encoder: nn.Module, patches: Tensor, grids: Tensor) -> Tensor:
    """Features [image tokens, 1 + deepstack, hidden] of images given by patches [P, D] and grids [I, 3], I >= 1."""
    output = encoder(patches, grid_thw=grids, return_dict=True)
    return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", [])], dim=1)


def freeze(chunks: Sequence[nn.Module], *, train_encoder: bool, train_adapter: bool) -> None:
    """Disable gradients of encoder or adapter if they do not train. Called before the chunks are wrapped."""
    for name, parameter in _vision_parameters(chunks):
        is_adapter = name.startswith(ADAPTER)
        parameter.requires_grad_(train_adapter if is_adapter else train_encoder)


def _vision_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith("vision."):
                yield name.removeprefix("vision."), parameter


def assign_images(costs: Sequence[float], num_ranks: int, homes: Sequence[range] | None = None) -> list[int]:
    """Assign a rank to each image: the most expensive image first, each to the least loaded rank.

    Ties go to a rank in the image's range of ``homes`` (the ranks whose batch contains the image), then to the
    lowest rank. No rank gets more than the mean cost per rank plus the cost of one image.
    """
    loads, ranks = [0.0] * num_ranks, [0] * len(costs)
    for image in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        home = homes[image] if homes is not None else range(0)
        ranks[image] = min(range(num_ranks), key=lambda rank: (loads[rank], rank not in home, rank))
        loads[ranks[image]] += costs[image]
    return ranks


def image_flops(config: PretrainedConfig, grid: Sequence[int]) -> float:
    """Floating-point operations of encoding one image (two per multiply-add); grid in patches (time, height, width)."""
    hidden, merged = config.hidden_size, config.hidden_size * config.spatial_merge_size**2
    frame = grid[1] * grid[2]
    patches = grid[0] * frame
    windowed_layers, window = 0, frame
    if hasattr(config, "fullatt_block_indexes"):
        windowed_layers = config.depth - len(config.fullatt_block_indexes)
        window = min(frame, (config.window_size // config.patch_size) ** 2)
    num_mlp_matrices = 3 if hasattr(config, "fullatt_block_indexes") else 2
    per_patch = config.depth * (4 * hidden**2 + num_mlp_matrices * hidden * config.intermediate_size)
    attended = (config.depth - windowed_layers) * frame + windowed_layers * window
    adapters = 1 + num_deepstack(config)
    per_token = adapters * merged * (merged + config.out_hidden_size)
    return 2.0 * patches * (per_patch + 2 * hidden * attended + per_token / config.spatial_merge_size**2)


def encode_balanced(
    encoder: nn.Module, images: Images | None, vision_config: PretrainedConfig, config: TransformerConfig
) -> Tensor:
    """Features [image tokens of this rank's batch, 1 + deepstack, hidden]; collective over the group."""
    parameter = next(encoder.parameters())
    if images is None:
        nothing = torch.zeros(0, dtype=torch.int64)
        images = Images([], nothing.view(0, 3), nothing)
    group, num_peers = _group(config)
    grids, has, counts = _gather_grids(images, group, parameter.device)
    batch_of_image = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).tolist()
    # Tensor- and context-parallel peers are consecutive and have the same batch: the first peer's list counts.
    batches = range(0, group.size(), num_peers)
    images_of = [[i for i, rank in enumerate(batch_of_image) if rank == first] for first in batches]
    listed = [image for own in images_of for image in own]
    homes = [range(first, first + num_peers) for first, own in zip(batches, images_of, strict=True) for _ in own]
    costs = [image_flops(vision_config, grids[image].tolist()) for image in listed]
    ranks = assign_images(costs, group.size(), homes)
    firsts = cu_seqlens_of(torch.tensor(counts)).tolist()
    cutters = [
        [rank for rank in home if has[firsts[rank] + image - firsts[home.start]]]
        for image, home in zip(listed, homes, strict=True)
    ]
    plan = _Plan(
        homes=homes,
        cutters=cutters,
        ranks=ranks,
        sizes=grids[listed].prod(-1).tolist(),
        me=group.rank(),
        num_ranks=group.size(),
    )
    size_of_patch = vision_config.in_channels * vision_config.temporal_patch_size * vision_config.patch_size**2
    patches = _exchange_patches(images, plan, group, parameter.new_zeros(0, size_of_patch))
    assigned = [i for i, rank in enumerate(ranks) if rank == plan.me]
    width = 1 + num_deepstack(vision_config)
    # The encoder has no collectives, so a rank without images skips it; the exchanges are collective for all ranks.
    if assigned:
        features = encode(encoder, patches, grids[[listed[i] for i in assigned]].to(parameter.device))
    else:
        features = parameter.new_zeros((0, width, vision_config.out_hidden_size))
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in encoder.parameters())
    if trains and not features.requires_grad:
        # The backward pass of the exchange is collective also, so the features of a rank without images need a gradient.
        features.requires_grad_()
    return _exchange_features(features, plan, group, vision_config.spatial_merge_size**2)


def _group(config: TransformerConfig) -> tuple[dist.ProcessGroup, int]:
    """The group that shares images, and the number of consecutive ranks in it with the same batch."""
    num_peers = config.context_parallel_size
    if config.sequence_parallel:
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return group, num_peers * config.tensor_model_parallel_size
    return parallel_state.get_data_parallel_group(with_context_parallel=True), num_peers


def _gather_grids(
    images: Images, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, list[int], list[int]]:
    """Grids [sum of counts, 3] of all ranks' images on the CPU, a flag per image (the rank has its patches), counts by rank."""
    has = torch.tensor([source is not None for source in images.sources], dtype=torch.int64)
    own = torch.cat([images.grids, has[:, None]], dim=1)
    if group.size() == 1:
        return images.grids, has.tolist(), [len(own)]
    counts = torch.zeros(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(counts, torch.tensor([len(own)], device=device), group=group)
    longest = int(counts.max())
    if longest == 0:
        return images.grids, [], [0] * group.size()
    padded = torch.zeros((longest, 4), dtype=torch.int64, device=device)
    padded[: len(own)] = own.to(device)
    gathered = torch.zeros((group.size() * longest, 4), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, padded, group=group)
    real = counts.tolist()
    rows = torch.cat([part[:n] for part, n in zip(gathered.cpu().split(longest), real, strict=True)])
    return rows[:, :3], rows[:, 3].tolist(), real


@dataclass(frozen=True)
class _Plan:
    """Assignment of the group's images to encoding ranks; images are numbered batch by batch."""

    homes: Sequence[range]
    """The ranks whose batch contains the image, for each image."""
    cutters: Sequence[Sequence[int]]
    """The ranks among its homes that have the image's patches, for each image."""
    ranks: Sequence[int]
    """The rank that encodes the image, for each image."""
    sizes: Sequence[int]
    """Number of patches of each image."""
    me: int
    num_ranks: int

    def source(self, image: int) -> int:
        """The rank that sends the image's patches to its encoding rank; the encoding rank itself if it has the patches."""
        cutters, rank = self.cutters[image], self.ranks[image]
        return rank if rank in cutters else cutters[image % len(cutters)]

    def sent_patches(self, source: int, target: int) -> list[int]:
        """Images whose patches ``source`` sends to ``target``."""
        return [i for i, rank in enumerate(self.ranks) if rank == target and self.source(i) == source]

    def encoded_for(self, source: int, target: int) -> list[int]:
        """Images that ``source`` encodes and whose features ``target`` needs."""
        return [i for i, rank in enumerate(self.ranks) if rank == source and target in self.homes[i]]


def _exchange_patches(images: Images, plan: _Plan, group: dist.ProcessGroup, nothing: Tensor) -> Tensor:
    """The patches that this rank encodes, in the order of the images.

    ``nothing``: an empty tensor of patches, with the encoder's dtype and device.
    """
    own = (image for image, home in enumerate(plan.homes) if plan.me in home)
    local_index = {image: index for index, image in enumerate(own)}
    sent = [plan.sent_patches(plan.me, rank) for rank in range(plan.num_ranks)]
    patches = torch.cat([nothing, *(images.patches(local_index[i]).to(nothing) for one_rank in sent for i in one_rank)])
    if plan.num_ranks == 1:
        return patches
    received = [plan.sent_patches(rank, plan.me) for rank in range(plan.num_ranks)]
    arrived = _all_to_all(patches, _totals(sent, plan.sizes), _totals(received, plan.sizes), group)
    return arrived.index_select(0, _sorted_rows(received, plan.sizes).to(nothing.device))


def _exchange_features(features: Tensor, plan: _Plan, group: dist.ProcessGroup, patches_per_token: int) -> Tensor:
    if plan.num_ranks == 1:
        return features
    sizes = [size // patches_per_token for size in plan.sizes]
    assigned = [i for i, rank in enumerate(plan.ranks) if rank == plan.me]
    bounds = cu_seqlens_of(torch.tensor([sizes[i] for i in assigned], dtype=torch.int64)).tolist()
    starts = dict(zip(assigned, bounds[:-1], strict=True))
    sent = [plan.encoded_for(plan.me, rank) for rank in range(plan.num_ranks)]
    received = [plan.encoded_for(rank, plan.me) for rank in range(plan.num_ranks)]
    nothing = torch.zeros(0, dtype=torch.int64)
    rows = torch.cat([nothing, *(torch.arange(starts[i], starts[i] + sizes[i]) for one_rank in sent for i in one_rank)])
    chosen = features.flatten(1).index_select(0, rows.to(features.device))
    arrived = _Exchange.apply(chosen, _totals(sent, sizes), _totals(received, sizes), group)
    order = _sorted_rows(received, sizes).to(features.device)
    return arrived.index_select(0, order).unflatten(1, features.shape[1:])


def _totals(images: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[i] for i in one_rank) for one_rank in images]


def _sorted_rows(images: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
    """Indices that sort rows received rank by rank into the order of the images."""
    rows: dict[int, Tensor] = {}
    start = 0
    for image in (i for one_rank in images for i in one_rank):
        rows[image] = torch.arange(start, start + sizes[image])
        start += sizes[image]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(rows[image] for image in sorted(rows))])


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; backward returns the gradients to the sending ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None
