"""Order of arriving micro-batches, compared with simulated stages that send their results in order."""

import itertools

import pytest
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_rl.parallel.pipeline_shapes import arrivals


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_arrivals_have_the_order_of_the_neighbors_messages(
    num_stages: int, num_chunks: int, num_groups: int
) -> None:
    num_microbatches = num_groups * num_stages
    table = get_schedule_table(num_microbatches, num_chunks, num_stages)
    last = num_chunks - 1
    for rank in range(num_stages):
        previous, following = (rank - 1) % num_stages, (rank + 1) % num_stages
        # Outputs go on until the model's last chunk on the last rank, gradients until its first on the first.
        sent = [index for index, chunk in table if (previous, chunk) != (num_stages - 1, last)]
        assert arrivals(num_microbatches, num_chunks, num_stages, is_end=rank == 0) == sent
        sent = [index for index, chunk in table if (following, last - chunk) != (0, 0)]
        assert arrivals(num_microbatches, num_chunks, num_stages, is_end=rank == num_stages - 1) == sent


def test_without_interleaving_every_microbatch_arrives_once_in_order() -> None:
    for count, stages in itertools.product((1, 2, 5), (2, 4)):
        assert arrivals(count, 1, stages, is_end=False) == list(range(count))
        assert arrivals(count, 1, stages, is_end=True) == []
