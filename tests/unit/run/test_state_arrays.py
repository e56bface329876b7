"""Laws of the driver's state in a checkpoint: flattening round-trips, and damage is an error."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.run.state_arrays import flatten_state, unflatten_state

ARRAYS = st.builds(
    lambda numbers, dtype: np.array(numbers, dtype),
    st.lists(st.integers(-100, 100), max_size=5),
    st.sampled_from([np.int32, np.float32]),
)
NESTS = st.recursive(
    ARRAYS | st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def same(one, two):
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return isinstance(two, list) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


@given(NESTS)
def test_nested_arrays_round_trip(nest):
    plain, parts = flatten_state(nest)
    arrays = {name: np.concatenate(chunks) for name, chunks in parts.items()}
    assert all(array.dtype.name == name for name, array in arrays.items())
    assert same(unflatten_state(json.loads(json.dumps(plain)), arrays), nest)


@given(st.integers(-2, 6), st.integers(-2, 6), st.sampled_from(["int32", "float32"]))
def test_span_outside_the_flat_arrays_is_rejected(start, length, name):
    arrays = {"int32": np.arange(4, dtype=np.int32)}
    nest = {"x": [{"__array__": [name, start, length]}]}
    if name == "int32" and start >= 0 and length >= 0 and start + length <= 4:
        assert unflatten_state(nest, arrays)["x"][0].tolist() == list(range(start, start + length))
    else:
        with pytest.raises(ValueError, match="that were saved"):
            unflatten_state(nest, arrays)
