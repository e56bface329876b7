"""Ranges of a tensor as boxes, compared with all elements one by one."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from megatron_rl.training.optimizer import _pieces_of, boxes

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_boxes_are_the_elements_of_the_range_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    elements = torch.arange(numel).view(shape)
    found = list(boxes(shape, start, stop))
    for offset, size in found:
        assert len(offset) == len(size) == len(shape) and min(size) > 0
    parts = [elements[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].flatten() for box in found]
    assert torch.equal(torch.cat([torch.arange(0), *parts]), torch.arange(start, stop))
    assert len(found) <= 2 * len(shape) - 1


def weight_of(shape, global_shape, offset, prepend=0):
    return ShardedTensor("w", torch.nn.Parameter(torch.zeros(shape)), torch.float32, tuple(shape), global_shape, offset,
                         axis_fragmentations=None, replica_id=(0, 1, 3), prepend_axis_num=prepend)  # fmt: skip


def written(pieces, global_shape):
    """A tensor of zeros with the pieces of all ranks written to it; each element at most once."""
    found, times = torch.zeros(global_shape), torch.zeros(global_shape)
    for piece in pieces:
        index = tuple(slice(o, o + s) for o, s in zip(piece.global_offset, piece.local_shape, strict=True))
        found[index] = piece.data
        times[index] += 1
    assert times.max() <= 1
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_shards_of_all_ranks_form_the_tensor_and_share_its_memory(num_ranks):
    values = torch.arange(1.0, 31.0)
    weight = weight_of((5, 6), (4, 10, 6), (2, 5, 0), prepend=1)
    cuts = [30 * rank // num_ranks for rank in range(num_ranks + 1)]
    pieces = [
        piece
        for start, stop in itertools.pairwise(cuts)
        for piece in _pieces_of(weight, "exp_avg", values[start:stop], start)
    ]
    expected = torch.zeros(4, 10, 6)
    expected[2, 5:] = values.view(5, 6)
    assert torch.equal(written(pieces, (4, 10, 6)), expected)
    assert {piece.key for piece in pieces} == {"optimizer.state.exp_avg.w"}
    assert {piece.data.untyped_storage().data_ptr() for piece in pieces} == {values.untyped_storage().data_ptr()}
    # Replicated over tensor-parallel ranks as the weight is, but over no data-parallel ones.
    assert {piece.replica_id for piece in pieces} == {(0, 1, 0)}


def test_a_weight_stored_in_two_halves_is_split_between_them():
    def halves(key, tensor, replica_id, flattened_range):
        upper, lower = tensor.chunk(2)
        return [
            ShardedTensor(key, part, part.dtype, tuple(part.shape), (8, 3), (row, 0), None, replica_id)
            for part, row in ((upper, 1), (lower, 5))
        ]

    weight = ShardedTensorFactory("w", torch.nn.Parameter(torch.zeros(4, 3)), halves, lambda part: part, (0, 0, 0))
    values = torch.arange(1.0, 13.0)
    pieces = [*_pieces_of(weight, "param", values[:5], 0), *_pieces_of(weight, "param", values[5:], 5)]
    expected = torch.zeros(8, 3)
    expected[1:3], expected[5:7] = values[:6].view(2, 3), values[6:].view(2, 3)
    assert torch.equal(written(pieces, (8, 3)), expected)
