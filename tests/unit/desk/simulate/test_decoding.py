"""Servers by events against a simulator that takes every token by itself."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.desk.simulate import server_events
from megatron_rl.desk.simulate.decoding import ServerLimits, ServerRequests, expected_tokens, serve, spread
from megatron_rl.desk.simulate.timing import Decode, LinearCost, Timing
from megatron_rl.rollout.requests import Generation
from megatron_rl.rollout.sglang.balance import load_balancing
from megatron_rl.rollout.sglang.balance.load_balancing import OutputLengthEstimate
from tests.unit.desk.simulate.token_by_token import Server

TIMING = Timing(Decode((1.0, 3.0, 8.0), (0.5, 0.75, 2.0), 0.01), LinearCost(token_s=0.125, square_s=0.001, row_s=0.25))
requests = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60), st.integers(0, 30) | st.just(120)), min_size=1, max_size=12)
limits = st.builds(
    ServerLimits, st.integers(0, 5), st.sampled_from([0, 90, 150, 250]), st.integers(0, 6), st.integers(1, 4),
    prefill_tokens=st.sampled_from([7, 40, 8192]), conservativeness=st.sampled_from([0.0, 0.3, 1.0]),
    sent_share=st.sampled_from([0.95, 9.0]),
)  # fmt: skip


def columns(lengths):
    prefix, new, more = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    return prefix, new, new + more


def requests_of(prefix, new, room):
    return ServerRequests(prefix, new, room, expected_tokens(new, room))


@settings(max_examples=300, deadline=None)
@given(requests, limits)
@example([(0, 0, 120), (0, 53, 120), (30, 60, 4)], ServerLimits(0, 150, 0, 1, prefill_tokens=7, conservativeness=0.0, sent_share=0.95))
def test_events_give_what_every_single_token_gives(lengths, limit):
    prefix, new, room = columns(lengths)
    found = serve(requests_of(prefix, new, room), TIMING, limit)
    brute = Server(prefix.tolist(), new.tolist(), room.tolist(), TIMING, limit).run()
    assert found.retractions.tolist() == brute.retractions
    assert found.finish_s == pytest.approx(brute.finish_s, abs=1e-9)
    assert found.seconds == pytest.approx(max(brute.finish_s), abs=1e-9)
    assert found.context_token_steps == pytest.approx(brute.context_steps)


@pytest.mark.parametrize("seed", range(20))
def test_compiled_events_have_the_same_bits(monkeypatch, seed):
    """Up to 200 requests, responses of up to 18,000 tokens: near and far from their end, batched and alone, retracted or not."""
    rng = np.random.default_rng(seed)
    scale, number = int(rng.choice([20, 300, 9000])), int(rng.integers(65, 200))
    prefix, new, more = rng.integers(1, scale, (3, number))
    limit = ServerLimits(
        running=int(rng.choice([0, 3, 20])), kv_tokens=int(rng.choice([0, 4, 20])) * scale, inflight=int(rng.choice([2, 30])),
        prefill_tokens=int(rng.choice([7, 8192])), conservativeness=float(rng.choice([0, 0.3, 1.0])), sent_share=9.0,
    )  # fmt: skip
    compiled = serve(requests_of(prefix, new, new + more), TIMING, limit)
    monkeypatch.setattr(server_events, "_compiled", lambda: None)
    python = serve(requests_of(prefix, new, new + more), TIMING, limit)
    for name, values in vars(compiled).items():
        assert np.asarray(values).tobytes() == np.asarray(getattr(python, name)).tobytes(), name


@settings(max_examples=50, deadline=None)
@given(requests, limits)
def test_at_its_end_a_request_has_its_tokens_and_before_it_fewer(lengths, limit):
    prefix, new, room = columns(lengths)
    found = serve(requests_of(prefix, new, room), TIMING, limit)
    assert found.tokens_at(found.seconds, new).tolist() == new.tolist()
    for moment in np.linspace(0, found.seconds, 7)[:-1]:
        made = found.tokens_at(moment, new)
        late = (found.finish_s > moment) & (new > 0)
        assert (made[late] < new[late]).all() and (made[~late] == new[~late]).all() and (made >= 0).all()


def test_a_full_cache_retracts_and_its_ratio_rises():
    """30 requests of 200 to 400 tokens that might have 600: admitted by their few tokens so far, then too many for the cache."""
    prefix, new, room = np.full(30, 10), np.random.default_rng(0).integers(200, 400, 30), np.full(30, 600)
    limit = ServerLimits(kv_tokens=3000, conservativeness=0.01, prefill_tokens=20, sent_share=9)
    found = serve(requests_of(prefix, new, room), TIMING, limit)
    brute = Server(prefix.tolist(), new.tolist(), room.tolist(), TIMING, limit).run()
    assert found.retractions.tolist() == brute.retractions and sum(brute.retractions) > 0
    assert found.finish_s == pytest.approx(brute.finish_s)


def test_the_client_expects_what_its_estimate_gives():
    """The estimate after a step of the same requests (rollout/sglang/balance/load_balancing.py)."""
    new, room = np.array([3, 700, 900, 40, 5]), np.array([8, 1000, 1000, 50, 6])
    estimate = OutputLengthEstimate()
    for index, (length, most) in enumerate(zip(new.tolist(), room.tolist(), strict=True)):
        estimate.sent(str(index), most)
        estimate.ended(str(index), most, Generation(np.arange(length), np.zeros(length), "stop", "1", 0))
    assert expected_tokens(new, room).tolist() == [estimate.expected(most) for most in room.tolist()]
    assert (ServerLimits().sent_share, server_events.MOST_BATCHED_TOKENS) == (load_balancing._FILLED, load_balancing._MOST_BATCHED_TOKENS)


def test_tokens_at_a_moment_against_a_curve_without_context():
    """Three requests, a step of one second whatever runs: after t seconds each has t more tokens."""
    timing = Timing(Decode((1.0,), (1.0,)))
    new = np.array([3, 8, 20])
    found = serve(requests_of(np.zeros(3, dtype=np.int64), new, new), timing, ServerLimits())
    for moment in (0.0, 1.0, 5.0, 12.0):
        assert found.tokens_at(moment, new).tolist() == [min(length, 1 + int(moment)) for length in (3, 8, 20)]


def test_requests_go_to_the_servers_in_turns():
    assert [own.tolist() for own in spread(5, 2)] == [[0, 2, 4], [1, 3]]
