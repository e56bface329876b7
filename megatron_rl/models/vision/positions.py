"""Positions of the tokens of a vision-language pack (time, height, width), and their rotary angles. Pure.

A text token has three equal positions. If an image starts at position p, its tokens have positions (p + time, p + row,
p + column), counted in merged patches; the following text continues at p + max(rows, columns). A sequence without images
has the positions of an ordinary language model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.data.batch import Images
from megatron_rl.errors import ModelError


def _image_token_counts(images: Images, merge_size: int) -> Tensor:
    """[I] int64: number of tokens of each image."""
    return images.grids.prod(-1) // merge_size**2


def image_rows(
    tokens: Tensor, lengths: Sequence[int], images: Images | None, image_token_id: int, merge_size: int
) -> list[Tensor]:
    """For each image, the (consecutive) rows of its tokens in the pack.

    Raises ModelError if image tokens and images do not match.
    """
    rows = (tokens == image_token_id).nonzero()[:, 0].cpu()
    counts = [] if images is None else _image_token_counts(images, merge_size).tolist()
    if len(rows) != sum(counts):
        raise ModelError(
            f"a batch has {len(rows)} image tokens (id {image_token_id}), but its {len(counts)} images need "
            f"{sum(counts)}; expand each image's token with the image processor's grid, and exclude the token from sampling"
        )
    if images is None or not counts:
        return []
    ends = torch.tensor(lengths).cumsum(0)
    rows_of_images = list(rows.split(counts))
    for index, (own, sequence) in enumerate(zip(rows_of_images, images.sequences.tolist(), strict=True)):
        actual = torch.searchsorted(ends, own[[0, -1]], right=True).tolist()
        if int(own[-1] - own[0]) + 1 != len(own) or actual != [sequence, sequence]:
            raise ModelError(
                f"image {index} of a batch needs {len(own)} consecutive tokens in sequence {sequence}, but the "
                f"corresponding image tokens are at {own[0]} to {own[-1]}, in sequences {actual[0]} to {actual[1]}; images "
                "must be in the order of their tokens"
            )
    return rows_of_images


def mrope_positions(lengths: Sequence[int], images: Images | None, rows: Sequence[Tensor], merge_size: int) -> Tensor:
    """Positions [3, T] int64 in time, height and width; ``rows``: result of ``image_rows``."""
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, -1).clone()
    if images is None:
        return positions
    ends = torch.tensor(lengths).cumsum(0)
    for own, grid, sequence in zip(rows, images.grids.tolist(), images.sequences.tolist(), strict=True):
        time, height, width = grid[0], grid[1] // merge_size, grid[2] // merge_size
        first, after = int(own[0]), int(own[-1]) + 1
        start = int(positions[0, first])
        positions[:, first:after] = start + torch.cartesian_prod(*map(torch.arange, (time, height, width))).T
        # The following text continues where the image's longer side ends.
        positions[:, after : ends[sequence]] -= len(own) - max(height, width)
    return positions


def rope_axes(section: Sequence[int], *, interleaved: bool) -> Tensor:
    """[half of the rotary dimensions] int64: the axis of each pair of dimensions: time (0), height (1) or width (2).

    ``section``: number of pairs per axis. The axes are consecutive blocks, or interleaved, with time in the remaining
    pairs.
    """
    if not interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(section))
    axes = torch.zeros(sum(section), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def mrope_angles(positions: Tensor, frequencies: Tensor, axes: Tensor) -> Tensor:
    """Rotary angles [P, 1, 1, rotary dimensions] float32 of positions [3, P], in the layout of Megatron's attention."""
    angles = (positions[axes].float() * frequencies[:, None]).T
    return torch.cat([angles, angles], dim=-1)[:, None, None]
