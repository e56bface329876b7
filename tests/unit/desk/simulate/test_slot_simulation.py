"""Which responses a step has, against slots that grow token by token; over-sampling by its laws."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schedule_facts import Facts, Overlap
from megatron_rl.desk.simulate.decoding import ServerLimits
from megatron_rl.desk.simulate.prediction import work_of
from megatron_rl.desk.simulate.scenario import Scenario
from megatron_rl.desk.simulate.slot_simulation import SlotProcess
from megatron_rl.desk.simulate.timing import Decode, Timing
from tests.unit.desk.simulate.token_by_token import SlotsTokenByToken

TIMING = Timing(Decode((1.0, 8.0), (1.0, 2.0)))


def process(overlap, lengths, *, num_slots=6, num_trained=None, group_size=1, window=5, jitter=0, training_window=1):
    drawn, facts = iter(lengths), Facts(overlap, training_window_tokens=training_window)
    scenario = Scenario(facts, num_trained or num_slots, num_slots, group_size, 40, window, jitter, 2, ServerLimits())
    return SlotProcess(
        scenario,
        lambda rng, n: np.array([next(drawn) for _ in range(n)]),
        lambda rng, n: 1 + rng.integers(0, 4, n),
        np.random.default_rng(0),
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(Overlap), st.lists(st.integers(1, 60), min_size=80, max_size=80), st.integers(1, 12))
def test_slots_grow_as_they_do_token_by_token(overlap, lengths, window):
    window = 40 if overlap is Overlap.nothing else window
    found, drawn = process(overlap, lengths, window=window), iter(lengths)
    brute = SlotsTokenByToken(lambda: (0, min(next(drawn), 40), window), 6, window, carries=overlap is not Overlap.nothing)
    for step in range(10):
        rows = found.generate(step, TIMING).generated
        expected = brute.step()
        assert rows.held.tolist() == [row["held"] for row in expected]
        assert rows.new.tolist() == [row["new"] for row in expected]
        assert rows.ended.tolist() == [row["held"] + row["new"] == row["length"] for row in expected]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([Overlap.critic, Overlap.training]),
    st.lists(st.integers(1, 60), min_size=120, max_size=120),
    st.integers(3, 12),
    st.integers(0, 3),
    st.sampled_from([1, 1.5, 2, 2.5, 3, math.inf]),
)
def test_windows_of_training_are_those_of_slots_token_by_token(overlap, lengths, window, jitter, windows):
    """``windows``: size of the window of training, in windows."""
    training_window = math.ceil(windows * window) if windows < math.inf else windows
    found = process(overlap, lengths, window=window, jitter=jitter, training_window=training_window)
    drawn, generated = iter(lengths), None

    def draw():
        return 0, min(next(drawn), 40), int(generated.first_window[len(brute.slots)])

    brute = SlotsTokenByToken(draw, 6, window, carries=True, training_window=training_window)
    for step in range(10):
        window_of_step = found.generate(step, TIMING)
        generated, rows = window_of_step.generated, window_of_step.trained
        expected = [row for row in brute.step() if row["trains"]]
        assert rows.new.tolist() == [row["trains"] for row in expected]
        assert rows.held.tolist() == [row["trained"] for row in expected]


def test_first_windows_are_shorter_by_the_jitter_and_the_others_full():
    found = process(Overlap.critic, [40] * 200, window=8, jitter=4, num_slots=20)
    first = found.generate(0, TIMING).generated.new
    assert set(first.tolist()) == {5, 6, 7, 8}
    assert set(found.generate(1, TIMING).generated.new.tolist()) == {8}


def test_a_small_rest_of_the_budget_goes_along():
    found = process(Overlap.critic, [40] * 200, window=19, num_slots=20)
    news = [found.generate(step, TIMING).generated.new.tolist() for step in range(3)]
    assert [set(new) for new in news] == [{19}, {19}, {2}]  # 2 of 19 are more than a sixteenth
    found = process(Overlap.critic, [40] * 200, window=20, jitter=2, num_slots=20)
    grown = [found.generate(step, TIMING).generated for step in range(2)]
    assert grown[1].ended.all() and set(grown[1].new.tolist()) == {20, 21}


def test_a_group_has_one_prompt():
    rows = process(Overlap.critic, [3] * 50, group_size=3).generate(0, TIMING).generated
    assert rows.group.tolist() == [0, 0, 0, 1, 1, 1] and len(set(rows.prompt[:3].tolist())) == 1


def test_enough_windows_end_a_step_and_what_was_cut_keeps_its_tokens():
    """4 of 6 suffice; each has a window of 5 and a length of its own."""
    found = process(Overlap.critic, [1, 2, 3, 4, 30, 30, *[1] * 20], num_trained=4)
    window = found.generate(0, TIMING)
    assert window.generated.new[:4].tolist() == [1, 2, 3, 4] and (window.generated.new[4:] < 5).all()
    held = window.generated.new[4:].tolist()
    carried = found.generate(1, TIMING).generated
    assert carried.held[:2].tolist() == held and carried.total[:2].tolist() == [30, 30]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_without_a_critic_a_response_leaves_its_slot_when_it_ends_and_trains_when_its_group_has(size, window, seed):
    facts = Facts(critic=False, training_window_tokens=math.inf, whole_groups=True)
    scenario = Scenario(facts, 7, 7, size, 40, window, num_servers=2, limits=ServerLimits())
    lengths = np.random.default_rng(seed).integers(1, 40, 400)
    drawn = iter(lengths.tolist())
    found = SlotProcess(
        scenario, lambda rng, n: np.array([next(drawn) for _ in range(n)]), lambda rng, n: np.full(n, 3), np.random.default_rng(0)
    )
    groups = [tuple(lengths[i : i + size].tolist()) for i in range(0, len(lengths), size)]
    ended, trained = Counter(), set()
    for step in range(20):
        done = found.generate(step, TIMING)
        assert len(done.generated) == 7
        now = done.generated.group[done.generated.ended].tolist()
        assert sorted(done.finished.group.tolist()) == sorted(now)
        ended.update(now)
        whole = {group for group in now if ended[group] == size}
        rows = done.trained
        assert set(rows.group.tolist()) == whole and not whole & trained
        trained |= whole
        for group in whole:
            assert sorted(rows.new[rows.group == group].tolist()) == sorted(groups[group])
        assert rows.ended.all() and not rows.held.any()
        work = work_of(done, step)
        assert (work.num_finished, work.num_rows) == (len(now), size * len(whole))


def test_of_full_responses_whole_groups_train_and_the_rest_is_discarded():
    """Groups of 2, two are wanted: those of 3 and 9 tokens at most are first; the one with 40 is cut and gone."""
    found = process(Overlap.nothing, [1, 3, 40, 2, 9, 5, *[2] * 20], num_trained=4, group_size=2, window=40)
    window = found.generate(0, TIMING)
    assert window.trained.group.tolist() == [0, 0, 2, 2] and window.trained.ended.all()
    assert window.generated.new[2] < 40
    assert found.generate(1, TIMING).generated.group.min() == 3


def test_a_step_ends_with_the_last_of_what_is_enough():
    everything = process(Overlap.nothing, [5, 40], num_slots=2, num_trained=2, window=40).generate(0, TIMING).server_s
    enough = process(Overlap.nothing, [5, 40], num_slots=2, num_trained=1, window=40).generate(0, TIMING).server_s
    assert max(enough) == pytest.approx(4.0) and max(everything) == pytest.approx(39.0)
