"""Rotary position embeddings with the frequencies of transformers, for every scaling.

Megatron supports some of the scalings, with other parameters. Megatron's embeddings are kept; only their
frequencies are replaced, and the factor of some scalings on cosine and sine is passed to the attention layers.

If no fused kernel rotates a pack (latent attention, positions of images, a factor, no Transformer Engine), Megatron
reads the sequences' lengths back from the GPU in every layer. ``rotate_pack`` replaces that function: the results
are equal, and nothing waits for the GPU.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.families.family import family_of
from megatron_rl.families.rotary import inverse_frequencies
from megatron_rl.system.megatron_core import set_rotary_factor


class _LatentRotaryEmbedding(RotaryEmbedding):
    """Embedding for latent attention: returns angles [length, 1, 1, rotated dimensions] and the factor on cosine and sine."""

    def __init__(self, frequencies: Tensor, factor: float, template: RotaryEmbedding) -> None:
        super().__init__(2 * len(frequencies), 1.0, use_cpu_initialization=True, cp_group=template.cp_group)
        self.inv_freq, self.factor = frequencies, factor

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False) -> tuple[Tensor, float]:
        return super().forward(max_seq_len, offset, packed_seq), self.factor


def install_rope(model: GPTModel, hf_config: PretrainedConfig) -> None:
    """Give ``model`` the rotary embedding of ``hf_config``. Called once, before the model's first forward pass."""
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
        set_rotary_factor(model, factor)


def rotate_pack(
    rows: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    *,
    mscale: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
    **orders: bool,
) -> Tensor:
    """Rotate rows [T, heads, d] of this rank, given cu_seqlens [N+1] of the whole pack and freqs [positions, 1, 1, d].

    ``freqs`` has one entry per position of the longest sequence, or one entry per row of the pack. ``orders``: Megatron's names of
    other orders of a row's numbers, all False for halves.
    """
    group = cp_group or parallel_state.get_context_parallel_group()
    pack = (freqs, cu_seqlens, len(rows), group.size(), group.rank())
    plain = freqs.shape[-1] == rows.shape[-1] and not any(orders.values())
    if plain and rows.device.type == "cpu":
        rotated: Tensor = _Rotation.apply(rows, *_factors_of_rows(*pack, mscale, rows.dtype))
        return rotated
    return rope_utils._apply_rotary_pos_emb_bshd(rows.unsqueeze(1), _angles_of_rows(*pack), mscale=mscale, **orders).squeeze(1)


rope_utils._apply_rotary_pos_emb_thd = rotate_pack


class _Rotation(torch.autograd.Function):
    """Rotates the halves (a, b) of rows to (a cos - b sin, b cos + a sin), in less than half of the time of Megatron's on a CPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cos: Tensor, sin: Tensor, swapped_sin: Tensor) -> Tensor:
        ctx.factors = cos, swapped_sin
        return (rows * cos).addcmul_(_swapped(rows), sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, swapped_sin = ctx.factors
        return (grad * cos).addcmul_(_swapped(grad), swapped_sin), None, None, None


def _swapped(rows: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    return torch.cat((second, first), -1)


@functools.lru_cache(maxsize=1)
def _factors_of_rows(
    freqs: Tensor, cu_seqlens: Tensor, num_rows: int, cp_size: int, cp_rank: int, mscale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines, sines with the signs of the halves, and these with swapped halves, each [num_rows, 1, d]; cached as the angles."""
    angles = _angles_of_rows(freqs, cu_seqlens, num_rows, cp_size, cp_rank).squeeze(1)
    sin = angles.sin() * mscale
    sin.chunk(2, -1)[0].neg_()
    return (angles.cos() * mscale).to(dtype), sin.to(dtype), _swapped(sin).to(dtype)


@functools.lru_cache(maxsize=1)
def _angles_of_rows(freqs: Tensor, cu_seqlens: Tensor, num_rows: int, cp_size: int, cp_rank: int) -> Tensor:
    """Each row's angles, [num_rows, 1, 1, d]; cached, because the layers of a pass share them, in queries and keys."""
    return freqs.index_select(0, _angle_of_row(cu_seqlens, num_rows, len(freqs), cp_size, cp_rank))


def _angle_of_row(cu_seqlens: Tensor, num_rows: int, num_angles: int, cp_size: int, cp_rank: int) -> Tensor:
    """Index of each row's angle, [num_rows] int64.

    Cached as an attribute of ``cu_seqlens``, because every layer passes the same tensor.
    """
    is_whole = num_angles == num_rows * cp_size
    cache: dict[tuple[int, int, bool], Tensor] = vars(cu_seqlens).setdefault("angle_of_row", {})
    key = (cp_size, cp_rank, is_whole)
    if key not in cache:
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        rows = torch.arange(num_rows, device=cu_seqlens.device)
        owner = torch.searchsorted(ends // cp_size, rows, right=True)
        starts, lengths = starts[owner], (ends - starts)[owner]
        angles = rows - starts // cp_size
        if cp_size > 1:
            # The zigzag of ``context.py``: an early part of the sequence, then a late part.
            part = lengths // (2 * cp_size)
            late = lengths - (cp_rank + 1) * part + angles - part
            angles = torch.where(angles < part, cp_rank * part + angles, late)
        cache[key] = angles + starts if is_whole else angles
    return cache[key]
