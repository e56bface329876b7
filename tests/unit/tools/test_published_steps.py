"""Closed forms of a published step, against brute force: tools/published_steps.py."""

import random
import sys
from pathlib import Path

import pytest

from megatron_rl.desk.simulate.decoding import ServerLimits
from megatron_rl.desk.simulate.timing import Decode, Timing

TOOLS = Path(__file__).parents[3] / "tools"
sys.path.insert(0, str(TOOLS))
from published_steps import asynchronous_step_seconds, generation_seconds, straggler_factor, stream_seconds  # noqa: E402

sys.path.remove(str(TOOLS))


def test_a_stream_does_not_wait_for_the_longest():
    """Steps of one second: 4 slots are always full, so a batch takes its tokens / 4 seconds; a drained batch takes 100."""
    lengths, timing, limits = [100] + [10] * 30, Timing(Decode((1.0,), (1.0,))), ServerLimits(running=4)

    def drained(lengths):
        return generation_seconds(timing, limits, lengths, prompt_tokens=0, longest=100)

    assert drained(lengths) == 99  # the first token comes with the prefill
    stream = stream_seconds(timing, limits, lengths, prompt_tokens=0, longest=100)
    assert stream == pytest.approx((sum(lengths) - len(lengths)) / 4, rel=0.05) and stream < drained(lengths[::-1])


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
