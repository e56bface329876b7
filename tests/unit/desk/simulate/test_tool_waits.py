"""Waits for the environment in simulated windows, against rows that are followed one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schedule_facts import Facts, Overlap
from megatron_rl.desk.simulate.lengths import LengthDistribution, named_lengths
from megatron_rl.desk.simulate.scenario import Scenario
from megatron_rl.desk.simulate.slot_simulation import SlotProcess, ToolWaits, parse_waits, with_waits
from megatron_rl.desk.simulate.timing import Decode, Timing
from megatron_rl.errors import UserError

TIMING = Timing(Decode((1.0, 8.0), (1.0, 1.0)))


def waits_of(turn_tokens, milliseconds):
    drawn = iter(milliseconds)
    return ToolWaits(turn_tokens, LengthDistribution("", lambda rng, n: np.array([next(drawn) for _ in range(n)], np.int64)))


def window(wanted, waits, *, decode_s=None, held=None, total=None, left_s=None, step_wait_s=np.inf):
    wanted = np.array(wanted)
    zeros = np.zeros_like(wanted)
    held = zeros if held is None else np.array(held)
    return with_waits(
        wanted,
        wanted.astype(float) if decode_s is None else np.array(decode_s),
        held,
        held + wanted if total is None else np.array(total),
        np.zeros(len(wanted)) if left_s is None else np.array(left_s),
        waits,
        rng=np.random.default_rng(0),
        step_wait_s=step_wait_s,
    )


def test_full_responses_wait_for_every_call_but_have_none_after_their_end():
    found = window([10, 4], waits_of(5, [3000, 9000]), total=[11, 4])  # calls after 5 and 10 tokens; the other row has none
    assert found.seconds == 10 + 3 + 9 and found.grown.tolist() == [10, 4] and found.left_s.tolist() == [0.0, 0.0]
    assert window([10], waits_of(5, [3000, 9000]), total=[10]).seconds == 13


def test_a_window_ends_once_all_rows_have_waited_long_enough_and_the_rest_of_the_wait_is_left():
    found = window([10, 8], waits_of(4, [100_000, 50_000, 2000, 1000]), total=[99, 8], step_wait_s=5.0)
    # Row 0 calls after 4 tokens and waits 100 s; row 1 after 4 tokens for 2 s, and ends at 4 + 2 + 4 s.
    assert found.seconds == 15.0 and found.grown.tolist() == [4, 8] and found.left_s.tolist() == [89.0, 0.0]
    later = window([6], waits_of(4, [2000, 1000]), held=[4], total=[99], left_s=[89.0], step_wait_s=5.0)
    assert later.seconds == 89 + 4 + 2 + 2 and later.grown.tolist() == [6]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.lists(st.integers(1, 20_000), min_size=300, max_size=300),
    st.sampled_from([0.5, 5.0, np.inf]),
)
def test_rows_have_the_tokens_of_rows_that_are_followed_millisecond_by_millisecond(rows, turn_tokens, milliseconds, step_wait_s):
    wanted, held, more = (np.array(one) for one in zip(*rows, strict=True))
    found = window(wanted, waits_of(turn_tokens, milliseconds), held=held, total=held + wanted + more, step_wait_s=step_wait_s)
    drawn = iter(milliseconds)
    for row, (new, had, left) in enumerate(rows):
        clock, tokens = 0.0, 0
        calls = [next(drawn) / 1e3 for _ in range(sum((had + n) % turn_tokens == 0 and n < new + left for n in range(1, new + 1)))]
        for n in range(1, new + 1):  # one token per second
            clock += 1.0
            tokens += clock <= found.seconds + 1e-6
            if (had + n) % turn_tokens == 0 and n < new + left:
                clock += calls.pop(0)
        assert tokens == found.grown[row]
    assert (found.grown <= wanted).all() and (found.grown.sum() > 0) and (found.left_s >= 0).all()
    if step_wait_s == np.inf:
        assert (found.grown == wanted).all()


@pytest.mark.parametrize("overlap", [Overlap.nothing, Overlap.critic])
def test_every_token_is_generated_once_and_short_waits_change_nothing_else(overlap):
    def steps(waits):
        scenario = Scenario(Facts(overlap), 4, 4, 1, 40, 40 if overlap is Overlap.nothing else 6)
        rng = np.random.default_rng(3)
        slots = SlotProcess(scenario, named_lengths("uniform:min=5,max=60").draw, named_lengths("fixed:length=3").draw, rng, waits)
        return [slots.generate(step, TIMING) for step in range(12)]

    plain, short = steps(None), steps(ToolWaits(4, named_lengths("fixed:length=1")))
    # The calls draw from the same generator, so only the first step has the same lengths.
    assert plain[0].generated.new.tolist() == short[0].generated.new.tolist()
    assert max(plain[0].server_s) < max(short[0].server_s) < max(plain[0].server_s) + 0.1
    long = steps(ToolWaits(4, named_lengths("fixed:length=60000")))
    held: dict[tuple[int, int], int] = {}
    for step in long:
        for group, had, new in zip(step.generated.group, step.generated.held, step.generated.new, strict=True):
            assert held.get(group, 0) == had
            held[group] = had + new
    if overlap is Overlap.nothing:
        assert all(one.generated.ended.all() for one in long)
    assert max(max(one.server_s) for one in long) > 60


def test_the_flag_is_read_or_refused_with_what_was_expected():
    waits = parse_waits("400:lognormal:median=3000,sigma=1")
    assert waits.turn_tokens == 400 and 2000 < np.median(waits.draw_s(np.random.default_rng(0), 4000) * 1e3) < 4000
    assert parse_waits(None) is None
    for words in ("400", "0:fixed:length=1", "x:fixed:length=1", "400:"):
        with pytest.raises(UserError, match="--tool-times"):
            parse_waits(words)
    with pytest.raises(UserError, match="over_sampling"):
        SlotProcess(Scenario(Facts(Overlap.critic), 4, 8, 1, 40, 6), None, None, None, waits)
