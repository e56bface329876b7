"""Rotary position embeddings with the frequencies of transformers, whichever scaling they come from.

Megatron knows some of the scalings under other parameters. Its embeddings stay; only their frequencies are replaced,
and the factor that some scalings put on cosine and sine is handed to the attention layers.
"""

import math

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.families.family import family_of
from megatron_rl.families.rotary import inverse_frequencies


class _LatentRotaryEmbedding(RotaryEmbedding):
    """What latent attention asks for: (angles [length, 1, 1, rotated dimensions], the factor on cosine and sine)."""

    def __init__(self, frequencies: Tensor, factor: float, template: RotaryEmbedding) -> None:
        super().__init__(2 * len(frequencies), 1.0, use_cpu_initialization=True, cp_group=template.cp_group)
        self.inv_freq, self.factor = frequencies, factor

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False) -> tuple[Tensor, float]:
        return super().forward(max_seq_len, offset, packed_seq), self.factor


def install_rope(model: GPTModel, hf_config: PretrainedConfig) -> None:
    """Give ``model`` the rotary embedding that ``hf_config`` describes; once, before its first forward pass."""
    frequencies, factor = inverse_frequencies(hf_config)
    if torch.cuda.is_available():
        frequencies = frequencies.cuda()
    if family_of(hf_config).is_latent:
        for layer in model.decoder.layers:
            attention = layer.self_attention
            attention.rotary_pos_emb = _LatentRotaryEmbedding(frequencies, factor, attention.rotary_pos_emb)
        return
    model.rotary_pos_emb.inv_freq = frequencies
    if factor != 1.0:
        # Attention takes the factor as YaRN's formula, 1 + mscale * log(scale) / 10, from these fields alone.
        model.config.yarn_rotary_scaling_factor = math.e
        model.config.yarn_mscale = 10 * (factor - 1)
        model.config.yarn_mscale_all_dim = 0.0
