"""A GPT model that takes images: the encoder's features replace the embeddings of image tokens in the pack.

The encoder is a submodule of the first pipeline stage's chunk. With DeepStack, additional features are added to the
outputs of the first layers. These features are passed through Megatron's block as its ``context`` (their rows:
``context_mask``), because a recomputed layer passes gradients to its arguments only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.data.batch import Images, PackedBatch
from megatron_rl.errors import ModelError
from megatron_rl.families.family import family_of
from megatron_rl.models.context import split_here
from megatron_rl.models.gpt import PackedGPTModel
from megatron_rl.models.moe import local_rows
from megatron_rl.models.precision import pack_alignment
from megatron_rl.models.vision.balance import encode_balanced
from megatron_rl.models.vision.positions import image_rows, mrope_angles, mrope_positions, rope_axes


@dataclass(frozen=True)
class VisualInput:
    """Inputs of one pass for a batch's images."""

    images: Images | None
    rows: Tensor
    """[R] int64: rows of this rank's hidden states that are image tokens."""
    features: Tensor
    """[R] int64: index of each row's feature among the features of all images of the batch."""


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
            return _padded(positions, lengths, self.config).to(device), VisualInput(None, nothing, nothing)
        feature_of_token = torch.full((len(batch.tokens) + 1,), -1)
        all_rows = torch.cat([*images_rows, torch.zeros(0, dtype=torch.int64)])
        feature_of_token[all_rows] = torch.arange(len(all_rows))
        # Padding has row -1, which selects the additional last entry: no feature.
        feature_of_row = feature_of_token[local_rows(lengths, self.config)]
        rows = (feature_of_row >= 0).nonzero()[:, 0]
        visual = VisualInput(batch.images, rows.to(device), feature_of_row[rows].to(device))
        return _padded(positions, lengths, self.config).to(device), visual

    def forward(
        self, tokens: Tensor, positions: Tensor, attention_mask: Tensor | None, *, visual: VisualInput, **kwargs: Any
    ) -> Tensor:
        hidden, block_kwargs = None, {}
        if self.pre_process:
            hidden = self.embedding(input_ids=tokens, position_ids=positions)
            features = encode_balanced(self.vision, visual.images, self.hf_config.vision_config, self.config)
            features = features.index_select(0, visual.features).to(hidden.dtype).transpose(0, 1)
            hidden = hidden.index_copy(0, visual.rows, features[0].unsqueeze(1))
            if len(features) > 1:
                block_kwargs = dict(context=features[1:], context_mask=visual.rows)
        return super().forward(
            tokens, positions, attention_mask, decoder_input=hidden, extra_block_kwargs=block_kwargs, **kwargs
        )

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        decoder_input, _, *others = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        angles = mrope_angles(position_ids, self.rotary_pos_emb.inv_freq, self.rope_axes.to(position_ids.device))
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
