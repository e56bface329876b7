"""Laws of the soft overlong penalty."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import soft_overlong_penalty
from tests.unit.algorithms.ragged import assert_close


def test_overlong_penalty_matches_hand_computed_values():
    lengths = torch.tensor([0, 16384, 17408, 18432, 20480, 20481, 99999])
    expected = [0, 0, -0.25, -0.5, -1, -1, -1]
    assert_close(soft_overlong_penalty(lengths, max_length=20480, buffer=4096), expected)


@given(st.integers(0, 300), st.integers(0, 100), st.integers(100, 200))
def test_overlong_penalty_is_piecewise_linear(length: int, buffer: int, max_length: int):
    if length <= max_length - buffer:
        expected = 0.0
    elif length <= max_length:
        expected = ((max_length - buffer) - length) / buffer
    else:
        expected = -1.0
    assert_close(soft_overlong_penalty(torch.tensor([length]), max_length=max_length, buffer=buffer), [expected])


@given(st.integers(1, 20480), st.integers(1, 20480), st.sampled_from([1.0, 0.5]))
def test_overlong_penalty_equals_the_other_common_form_up_to_budget(length: int, buffer: int, factor: float):
    other = min(-(length - (20480 - buffer)) / buffer * factor, 0.0)
    found = factor * soft_overlong_penalty(torch.tensor([length]), max_length=20480, buffer=buffer)
    assert_close(found, [other])


def test_overlong_penalty_rejects_bad_arguments():
    with pytest.raises(ValueError, match="buffer: expected 0 <= buffer"):
        soft_overlong_penalty(torch.tensor([1]), max_length=10, buffer=11)
    with pytest.raises(ValueError, match="lengths: expected a 1-D integer or float"):
        soft_overlong_penalty(torch.tensor([[1]]), max_length=10, buffer=1)
