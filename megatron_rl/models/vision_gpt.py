"""A GPT model that takes images: the encoder's features replace the embeddings of image tokens in the pack.

The encoder is a submodule of the first pipeline stage's chunk. With DeepStack, additional features are added to the
outputs of the first layers. These features are passed through Megatron's block as its ``context`` (their rows:
``context_mask``), because a recomputed layer passes gradients to its arguments only.

Every token has three positions (time, height, width). Text tokens have three equal positions. If an image follows
position p - 1, its tokens have the positions (p + time, p + row, p + column), counted in merged patches. The text
after the image continues at p + the larger of the image's numbers of rows and columns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.data.batch import Images, PackedBatch, moved
from megatron_rl.errors import ModelError
from megatron_rl.families.family import family_of
from megatron_rl.models.image_encoding import encode_balanced
from megatron_rl.models.layers.context import pack_alignment, split_here
from megatron_rl.models.layers.moe import local_rows
from megatron_rl.models.layers.torch_layers import PackedGPTModel

VisualInput = tuple[Images | None, Tensor, Tensor]
"""A batch's images, rows [R] int64 of this rank's hidden states that are image tokens, and [R] int64: the index of
each row's feature among the features of all images."""


class DeepstackLayer(TransformerLayer):
    """A layer that adds the first of the features in ``context`` [n, R, H] to its output and returns the remaining ones."""

    def forward(
        self, *args: Any, context: Tensor | None = None, context_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        hidden, _ = super().forward(*args, **kwargs)
        if context is None:
            return hidden, None
        hidden = hidden.index_add(0, context_mask, context[0].unsqueeze(1))
        return hidden, context[1:] if len(context) > 1 else None


class VisionGPTModel(PackedGPTModel):
    """A vision-language GPT model. Position ids are [3, P] (time, height, width) for the whole pack with padding."""

    hf_config: PretrainedConfig
    rope_axes: Tensor

    def see(self, hf_config: PretrainedConfig) -> None:
        """Set the model's image tokens and positions from its configuration. Called once, after the model is built."""
        self.hf_config = hf_config
        rope = hf_config.text_config.rope_parameters
        vision = family_of(hf_config).vision
        # On the CPU explicitly, because the caller may be building a model on the meta device.
        with torch.device("cpu"):
            self.rope_axes = rope_axes(
                rope["mrope_section"], interleaved=vision is not None and vision.interleaves_positions
            )

    def visual_inputs(self, batch: PackedBatch, device: torch.device) -> tuple[Tensor, VisualInput]:
        """Positions [3, P] of the pack with padding, and the image inputs of this rank.

        Raises ModelError for a batch whose image tokens and images do not match, or that has video tokens.
        """
        config, lengths = self.hf_config, batch.lengths.tolist()
        merge_size = config.vision_config.spatial_merge_size
        if bool((batch.tokens == config.video_token_id).any()):
            raise ModelError(
                f"a batch has video tokens (id {config.video_token_id}); pass a video as its frames: one image each, "
                "preceded by its time as text"
            )
        images_rows = image_rows(batch.tokens, lengths, batch.images, config.image_token_id, merge_size)
        positions = mrope_positions(lengths, batch.images, images_rows, merge_size)
        if not self.pre_process:
            nothing = torch.zeros(0, dtype=torch.int64)
            return moved(_padded(positions, lengths, self.config), device), (None, nothing, nothing)
        feature_of_token = torch.full((len(batch.tokens) + 1,), -1)
        all_rows = torch.cat([*images_rows, torch.zeros(0, dtype=torch.int64)])
        feature_of_token[all_rows] = torch.arange(len(all_rows))
        # Padding has row -1, which selects the additional last entry: no feature.
        feature_of_row = feature_of_token[local_rows(lengths, self.config)]
        rows = (feature_of_row >= 0).nonzero()[:, 0]
        visual = (batch.images, moved(rows, device), moved(feature_of_row[rows], device))
        return moved(_padded(positions, lengths, self.config), device), visual

    def forward(
        self, tokens: Tensor, positions: Tensor, attention_mask: Tensor | None, *, visual: VisualInput, **kwargs: Any
    ) -> Tensor:
        hidden, block_kwargs = None, {}
        if self.pre_process:
            hidden = self.embedding(input_ids=tokens, position_ids=positions)
            images, rows, features_of_rows = visual
            features = encode_balanced(self.vision, images, self.hf_config.vision_config, self.config)
            features = features.index_select(0, features_of_rows).to(hidden.dtype).transpose(0, 1)
            hidden = hidden.index_copy(0, rows, features[0].unsqueeze(1))
            if len(features) > 1:
                block_kwargs = dict(context=features[1:], context_mask=rows)
        return super().forward(
            tokens, positions, attention_mask, decoder_input=hidden, extra_block_kwargs=block_kwargs, **kwargs
        )

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        decoder_input, _, *others = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        axes = moved(self.rope_axes, position_ids.device)
        angles = mrope_angles(position_ids, self.rotary_pos_emb.inv_freq, axes)
        return (decoder_input, angles, *others)


def _padded(positions: Tensor, lengths: list[int], config: TransformerConfig) -> Tensor:
    """Add this layout's padding to the positions, [3, T] -> [3, P]; padding has position 0."""
    if config.context_parallel_size == 1:
        return torch.nn.functional.pad(positions, (0, -positions.shape[1] % pack_alignment(config)))
    padded_lengths = split_here(tuple(lengths), config).lengths
    padded = positions.new_zeros((3, sum(padded_lengths)))
    start = padded_start = 0
    # Not strict, because the padding may include an additional sequence at the end.
    for length, padded_length in zip(lengths, padded_lengths, strict=False):
        padded[:, padded_start : padded_start + length] = positions[:, start : start + length]
        start, padded_start = start + length, padded_start + padded_length
    return padded


def _image_token_counts(images: Images, merge_size: int) -> Tensor:
    """[I] int64: number of tokens of each image."""
    return images.grids.prod(-1) // merge_size**2


def image_rows(
    tokens: Tensor, lengths: Sequence[int], images: Images | None, image_token_id: int, merge_size: int
) -> list[Tensor]:
    """For each image, the (consecutive) rows of its tokens in the pack.

    Raises ModelError if image tokens and images do not match.
    """
    rows = (tokens == image_token_id).nonzero()[:, 0]
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

    ``section``: number of pairs per axis. The axes are consecutive blocks, or interleaved, with time in the
    remaining pairs.
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
