"""Closed forms of a step's seconds: megatron_rl/desk/costs/step_time.py."""

import random

import pytest

from megatron_rl.desk.costs.step_time import asynchronous_step_seconds, straggler_factor


def test_equal_sequences_have_no_stragglers():
    assert straggler_factor([2.0] * 64, num_replicas=4, sequences_per_update=16) == pytest.approx(1.0)
    assert straggler_factor([1.0, 9.0, 3.0], num_replicas=1, sequences_per_update=1) == pytest.approx(1.0)


def test_one_long_sequence_delays_all_replicas_of_its_update():
    """15 of cost 1 and one of 17: two updates of 8 on 4 replicas take 2 and 18 instead of 4 each when balanced."""
    assert straggler_factor([1.0] * 15 + [17.0], num_replicas=4, sequences_per_update=8) == pytest.approx(20 / 8)


def test_a_heavy_tail_gains_little_from_more_replicas():
    rng = random.Random(0)
    costs = [rng.paretovariate(1.15) for _ in range(2048)]

    def seconds(replicas: int) -> float:
        return straggler_factor(costs, num_replicas=replicas, sequences_per_update=256) / replicas

    assert seconds(4) > seconds(8) > seconds(32) > seconds(4) / 8
    one_update = straggler_factor(costs, num_replicas=8, sequences_per_update=2048)
    assert one_update < straggler_factor(costs, num_replicas=8, sequences_per_update=256)


def test_an_asynchronous_step_is_its_slowest_part():
    assert asynchronous_step_seconds(train=10, stream=7, publish=1) == 11
    assert asynchronous_step_seconds(train=10, stream=17, publish=1) == 18
    assert asynchronous_step_seconds(train=10, stream=7, publish=1, batch=30, staleness=1) == 31
    assert asynchronous_step_seconds(train=10, stream=7, publish=1, batch=30, staleness=8) == 11
