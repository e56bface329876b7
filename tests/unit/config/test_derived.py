"""What follows from a configuration."""

import pytest

from megatron_rl.config.derived import num_rollout_workers
from megatron_rl.config.schema import BatchConfig, Config, RolloutConfig


@pytest.mark.parametrize(
    ("slots", "window", "servers", "cores", "expected"),
    [
        (256, 80, 4, 64, 0),  # a quickstart
        (256, 8192, 1, 2, 1),
        (8192, 8192, 32, 64, 5),
        (8192, 8192, 2, 64, 2),
        (8192, 8192, 32, 8, 2),
    ],
)
def test_workers_follow_from_tokens_servers_and_cores(slots: int, window: int, servers: int, cores: int, expected: int) -> None:
    batch = BatchConfig(num_prompts_per_step=slots, num_samples_per_prompt=1, window_tokens=window, max_response_tokens=32768)
    assert num_rollout_workers(Config(batch=batch), servers, cores) == expected
    for given in (0, 3):
        assert num_rollout_workers(Config(batch=batch, rollout=RolloutConfig(num_workers=given)), servers, cores) == given
