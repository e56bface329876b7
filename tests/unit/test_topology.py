"""Coordinates of ranks: every layout is a bijection, in Megatron's order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.parallel.topology import coordinates


@given(tp=st.integers(1, 4), pp=st.integers(1, 4), dp=st.integers(1, 4))
def test_ranks_and_coordinates_are_one_to_one_tensor_fastest_pipeline_slowest(tp: int, pp: int, dp: int) -> None:
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    found = [coordinates(rank, tp * pp * dp, parallel) for rank in range(tp * pp * dp)]
    assert found == [(t, d, p) for p in range(pp) for d in range(dp) for t in range(tp)]


@pytest.mark.parametrize(
    ("rank", "world_size", "parallel", "message"),
    [
        (0, 6, ParallelConfig(tensor_parallel_size=4), "6 ranks .* parallel.tensor_parallel_size 4"),
        (0, 4, ParallelConfig(pipeline_parallel_size=3), "parallel.pipeline_parallel_size 3"),
        (0, 4, ParallelConfig(tensor_parallel_size=0), "at least 1"),
        (4, 4, ParallelConfig(), "rank is in"),
    ],
)
def test_an_impossible_layout_is_refused_by_its_key(
    rank: int, world_size: int, parallel: ParallelConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        coordinates(rank, world_size, parallel)
