"""The hash behind SGLang's seeded sampling, without Triton."""

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (32 bit) of (seed, position, column): the same values as SGLang's Triton kernel.

    seed, positions: [sequences]; col_indices: [vocabulary]. Returns [sequences, vocabulary] int64 in [0, 2**32).
    """
    seed = seed.to(torch.int64)[:, None]
    words = (
        seed & _MASK32,
        (seed >> 32) & _MASK32,
        positions.to(torch.int64)[:, None] & _MASK32,
        col_indices.to(torch.int64)[None, :],
    )
    hashed = torch.zeros_like(seed)
    for word in words:
        hashed = _murmur_mix(hashed, word)
    hashed = hashed ^ (4 * len(words))
    hashed = hashed ^ (hashed >> 16)
    hashed = (hashed * 0x85EBCA6B) & _MASK32
    hashed = hashed ^ (hashed >> 13)
    hashed = (hashed * 0xC2B2AE35) & _MASK32
    return hashed ^ (hashed >> 16)


def _murmur_mix(hashed: Tensor, word: Tensor) -> Tensor:
    word = _rotate_left((word * 0xCC9E2D51) & _MASK32, 15)
    word = (word * 0x1B873593) & _MASK32
    return (_rotate_left(hashed ^ word, 13) * 5 + 0xE6546B64) & _MASK32


def _rotate_left(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK32
