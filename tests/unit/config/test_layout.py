"""Laws of config/layout.py: ranks that a layout needs."""

import pytest

from megatron_rl.config.layout import fewest_ranks
from megatron_rl.config.load import load_config


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ([], 1),
        (["parallel.tensor_parallel_size=4"], 4),
        (["parallel.pipeline_parallel_size=2", "parallel.context_parallel_size=3"], 6),
        (["parallel.tensor_parallel_size=2", "parallel.expert_parallel_size=8", "parallel.expert_tensor_parallel_size=1"], 8),
        (["parallel.tensor_parallel_size=4", "critic.parallel={pipeline_parallel_size: 6}"], 12),
    ],
)
def test_fewest_ranks_are_divisible_by_the_layouts_of_both_models(overrides, ranks):
    assert fewest_ranks(load_config([], overrides)) == ranks
