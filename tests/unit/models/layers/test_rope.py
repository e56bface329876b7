"""Rotation of a pack against Megatron's own function, which reads lengths back from the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding

from megatron_rl.models.layers.rope import rotate_pack

MEGATRONS = rotary_pos_embedding._apply_rotary_pos_emb_thd


def group(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


@given(
    parts=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    cp=st.sampled_from([(1, 0), (2, 0), (2, 1), (4, 2)]),
    whole=st.booleans(),
    latent=st.booleans(),
    mscale=st.sampled_from([1.0, 1.2]),
)
def test_rotate_pack_equals_megatron(
    parts: list[int], cp: tuple[int, int], whole: bool, latent: bool, mscale: float
) -> None:
    lengths = torch.tensor(parts) * (2 * cp[0] if cp[0] > 1 else 1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(int(lengths.sum()) // cp[0], 3, 8, generator=generator)
    # Only the first dimensions rotate. One position more than needed, unless each row has its own angle.
    positions = int(lengths.sum()) if whole else int(lengths.max()) + 1
    freqs = torch.randn(positions, 1, 1, 6, generator=generator)
    options = dict(rotary_interleaved=False, multi_latent_attention=latent, mscale=mscale, cp_group=group(*cp))
    expected = MEGATRONS(rows, cu_seqlens, freqs, **options)
    for _ in range(2):  # computed, then cached
        assert torch.equal(rotate_pack(rows, cu_seqlens, freqs, **options), expected)


@pytest.mark.parametrize("mscale", [1.0, 1.2])
def test_whole_rows_on_a_cpu_rotate_as_megatrons_do_with_their_gradients(mscale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    cu_seqlens = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    # Queries are slices of a larger tensor. The two halves of the angles need not be equal.
    rows = torch.randn(8, 3, 24, dtype=torch.float64, generator=generator)[..., 8:16].requires_grad_()
    freqs = torch.randn(6, 1, 1, 8, dtype=torch.float64, generator=generator)
    grad = torch.randn(8, 3, 8, dtype=torch.float64, generator=generator)
    options = dict(mscale=mscale, cp_group=group(1, 0))
    ours, theirs = rotate_pack(rows, cu_seqlens, freqs, **options), MEGATRONS(rows, cu_seqlens, freqs, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    found, expected = (torch.autograd.grad(one, rows, grad) for one in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_rotate_pack_replaces_megatrons_function() -> None:
    assert rope_utils._apply_rotary_pos_emb_thd is rotate_pack is not MEGATRONS


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("positions", [8, 24])
def test_rotate_pack_reads_nothing_from_the_device(cp_size: int, positions: int) -> None:
    """Meta tensors have no values, so reading from the device would fail."""
    rows, freqs = torch.empty(24 // cp_size, 2, 8, device="meta"), torch.empty(positions, 1, 1, 8, device="meta")
    cu_seqlens = torch.empty(4, dtype=torch.int32, device="meta")
    assert rotate_pack(rows, cu_seqlens, freqs, cp_group=group(cp_size, 0)).shape == rows.shape
    with pytest.raises((RuntimeError, NotImplementedError)):
        MEGATRONS(rows, cu_seqlens, freqs, cp_group=group(cp_size, 0))
