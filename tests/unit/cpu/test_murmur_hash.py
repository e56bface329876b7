"""The sampling hash is MurmurHash3 over seed (64 bit), position and column (32 bit each)."""

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.cpu.murmur_hash import murmur_hash32

MASK = 0xFFFFFFFF


def murmur3_x86_32(data: bytes) -> int:
    """Reference implementation for whole words and hash seed 0."""

    def rotate(value: int, bits: int) -> int:
        return ((value << bits) | (value >> (32 - bits))) & MASK

    hashed = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = rotate(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        hashed = (rotate(hashed ^ word, 13) * 5 + 0xE6546B64) & MASK
    hashed ^= len(data)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & MASK
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & MASK
    return hashed ^ hashed >> 16


def test_reference_hash_equals_the_published_value():
    assert murmur3_x86_32(b"test") == 0xBA6BD213


@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
    position=st.integers(0, 2**31 - 1),
    num_columns=st.integers(1, 5),
)
def test_murmur_hash_equals_the_reference(seeds, position, num_columns):
    positions = torch.full((len(seeds),), position)
    hashed = murmur_hash32(torch.tensor(seeds).to(torch.uint64), positions, torch.arange(num_columns))
    expected = [[murmur3_x86_32(struct.pack("<QII", s, position, c)) for c in range(num_columns)] for s in seeds]
    assert hashed.tolist() == expected
