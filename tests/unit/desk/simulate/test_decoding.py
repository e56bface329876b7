"""Servers by events against a simulator that takes every token by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.desk.simulate.decoding import ServerLimits, serve, spread
from megatron_rl.desk.simulate.timing import Decode, LinearCost, Timing
from tests.unit.desk.simulate.token_by_token import Server

TIMING = Timing(Decode((1.0, 3.0, 8.0), (0.5, 0.75, 2.0), 0.01), LinearCost(token_s=0.125, square_s=0.001, row_s=0.25))
requests = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 25)), min_size=1, max_size=12)
limits = st.builds(
    ServerLimits, st.integers(0, 5), st.sampled_from([0, 40, 90]), st.integers(0, 6), http_batch=st.integers(1, 4)
)


@settings(max_examples=150, deadline=None)
@given(requests, limits)
def test_events_give_what_every_single_token_gives(lengths, limit):
    prefix, new = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    found = serve(prefix, new, TIMING, limit)
    brute = Server(prefix.tolist(), new.tolist(), TIMING, limit).run()
    assert found.finish_s == pytest.approx(brute.finish_s, abs=1e-9)
    assert found.seconds == pytest.approx(max(brute.finish_s), abs=1e-9)
    assert found.context_token_steps == pytest.approx(brute.context_steps)


@settings(max_examples=50, deadline=None)
@given(requests, limits)
def test_at_its_end_a_request_has_its_tokens_and_before_it_fewer(lengths, limit):
    prefix, new = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    found = serve(prefix, new, TIMING, limit)
    assert found.tokens_at(found.seconds, new).tolist() == new.tolist()
    for moment in np.linspace(0, found.seconds, 7)[:-1]:
        made = found.tokens_at(moment, new)
        late = (found.finish_s > moment) & (new > 0)
        assert (made[late] < new[late]).all() and (made[~late] == new[~late]).all() and (made >= 0).all()


def test_tokens_at_a_moment_against_a_curve_without_context():
    """Three requests, a step of one second whatever runs: after t seconds each has t more tokens."""
    timing = Timing(Decode((1.0,), (1.0,)))
    new = np.array([3, 8, 20])
    found = serve(np.zeros(3, dtype=np.int64), new, timing, ServerLimits())
    for moment in (0.0, 1.0, 5.0, 12.0):
        assert found.tokens_at(moment, new).tolist() == [min(length, 1 + int(moment)) for length in (3, 8, 20)]


def test_requests_go_to_the_servers_in_turns():
    assert [own.tolist() for own in spread(5, 2)] == [[0, 2, 4], [1, 3]]
