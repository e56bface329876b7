"""Where the tokens of a vision-language pack stand: three positions each (time, height, width), and their angles. Pure.

Text tokens have three equal positions. An image's tokens all start from the position p of its place: (p + its time, p +
its row, p + its column), counted in merged patches; the text after it goes on at p + the larger of its rows and
columns. A sequence without images has the positions of any language model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.data.batch import Images
from megatron_rl.errors import ModelError


def _image_token_counts(images: Images, merge_size: int) -> Tensor:
    """[I] int64: tokens that each image stands for."""
    return images.grids.prod(-1) // merge_size**2


def image_rows(
    tokens: Tensor, lengths: Sequence[int], images: Images | None, image_token_id: int, merge_size: int
) -> list[Tensor]:
    """Per image the rows of its tokens in the pack, which follow one another.

    Raises ModelError where tokens and images do not belong together.
    """
    rows = (tokens == image_token_id).nonzero()[:, 0].cpu()
    counts = [] if images is None else _image_token_counts(images, merge_size).tolist()
    if len(rows) != sum(counts):
        raise ModelError(
            f"a batch holds {len(rows)} image tokens (id {image_token_id}), but its {len(counts)} images stand for "
            f"{sum(counts)}; expand each image's token with the image processor's grid, and keep the token out of "
            "what is sampled"
        )
    if images is None or not counts:
        return []
    ends = torch.tensor(lengths).cumsum(0)
    found = list(rows.split(counts))
    for index, (own, sequence) in enumerate(zip(found, images.sequences.tolist(), strict=True)):
        places = torch.searchsorted(ends, own[[0, -1]], right=True).tolist()
        if int(own[-1] - own[0]) + 1 != len(own) or places != [sequence, sequence]:
            raise ModelError(
                f"image {index} of a batch stands for {len(own)} tokens in a row of sequence {sequence}, but the image "
                f"tokens in its place are at {own[0]} to {own[-1]}, in sequences {places[0]} to {places[1]}; images "
                "come in the order of their tokens"
            )
    return found


def mrope_positions(lengths: Sequence[int], images: Images | None, rows: Sequence[Tensor], merge_size: int) -> Tensor:
    """[3, T] int64 positions in time, height and width; ``rows`` from ``image_rows``."""
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, -1).clone()
    if images is None:
        return positions
    ends = torch.tensor(lengths).cumsum(0)
    for own, grid, sequence in zip(rows, images.grids.tolist(), images.sequences.tolist(), strict=True):
        time, height, width = grid[0], grid[1] // merge_size, grid[2] // merge_size
        first, after = int(own[0]), int(own[-1]) + 1
        start = int(positions[0, first])
        positions[:, first:after] = start + torch.cartesian_prod(*map(torch.arange, (time, height, width))).T
        # The text after it goes on where the image's longer side ends.
        positions[:, after : ends[sequence]] -= len(own) - max(height, width)
    return positions


def rope_axes(section: Sequence[int], *, interleaved: bool) -> Tensor:
    """[half of the rotary dimensions] int64: whether a pair of dimensions turns with time (0), height (1) or width (2).

    ``section``: pairs of each. They follow one another, or interleaved with time in the places left over.
    """
    if not interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(section))
    axes = torch.zeros(sum(section), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def mrope_angles(positions: Tensor, frequencies: Tensor, axes: Tensor) -> Tensor:
    """[P, 1, 1, rotary dimensions] float32 from positions [3, P], as Megatron's attention takes them."""
    angles = (positions[axes].float() * frequencies[:, None]).T
    return torch.cat([angles, angles], dim=-1)[:, None, None]
