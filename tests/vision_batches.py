"""Packed batches of text and images for tests, with the results of transformers."""

from typing import Any

import torch
from torch import Tensor

from megatron_rl.data.batch import Images, PackedBatch, cu_seqlens_of
from tests.tiny_families import VISION_TOKENS

IMAGE, START, END = (VISION_TOKENS[name] for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id"))
LAYOUT: list[list[int | tuple[int, int]]] = [[3, (4, 6), 7], [9], [2, (8, 2), 2, (6, 10), 5], [1, (2, 2), 4], [12]]
"""Sequences: numbers of text tokens, and images of (height, width) patches."""


def make_vision_batch(vision_config: Any, layout: list[list[int | tuple[int, int]]] = LAYOUT) -> PackedBatch:
    """The pack of ``layout``; its field ``mask`` is where a token may be predicted: text after text."""
    generator = torch.Generator().manual_seed(3)
    sequences, grids, owners = [], [], []
    for index, parts in enumerate(layout):
        pieces = []
        for part in parts:
            if isinstance(part, int):
                pieces.append(torch.randint(3, IMAGE, (part,), generator=generator))
                continue
            count = part[0] * part[1] // vision_config.spatial_merge_size**2
            pieces.append(torch.tensor([START, *[IMAGE] * count, END]))
            grids.append([1, *part])
            owners.append(index)
        sequences.append(torch.cat(pieces))
    grid = torch.tensor(grids)
    size = vision_config.in_channels * vision_config.temporal_patch_size * vision_config.patch_size**2
    patches = torch.randn(int(grid.prod(-1).sum()), size, generator=generator)
    tokens, cu_seqlens = torch.cat(sequences), cu_seqlens_of(torch.tensor([len(s) for s in sequences]))
    mask = tokens < IMAGE
    mask[cu_seqlens[:-1]] = False
    return PackedBatch(tokens, cu_seqlens, {"mask": mask}, Images.of_patches(patches, grid, torch.tensor(owners)))


def hf_logits(model: Any, batch: PackedBatch) -> Tensor:
    """[T, vocabulary], one sequence at a time."""
    logits = []
    for index in range(batch.num_sequences):
        one = batch.select([index])
        images: dict[str, Tensor] = {}
        if len(one.images.grids):
            images = dict(
                pixel_values=torch.cat([one.images.patches(i) for i in range(len(one.images.grids))]),
                image_grid_thw=one.images.grids,
                mm_token_type_ids=(one.tokens == IMAGE).int()[None],
            )
        logits.append(model(input_ids=one.tokens[None], **images).logits[0])
    return torch.cat(logits)


def load_vision_model(path: Any) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
