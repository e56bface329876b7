"""The data model of responses and dialogues: masks, turns, budgets and checkpoints."""

import json
from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory, message_segment

PROMPT = Prompt("p", (1, 2), fields={"tests": ["assert True"]})


def generated(num_tokens, step, *, turn=0, role="policy", reason="length", hot=False):
    return Segment(tuple(range(num_tokens)), (-0.5,) * num_tokens, step, reason, step, turn, role, hot)


def message(num_tokens, step, turn):
    return message_segment((99,) * num_tokens, weight_version=step, step=step, turn=turn)


def dialogue(*segments, budget=100, **fields):
    return Trajectory(0, PROMPT, 0, 0, budget, list(segments), dialogue=True, **fields)


TWO_TURNS = (
    generated(1, 0, hot=True),
    generated(2, 0),
    generated(1, 1, reason="stop"),
    message(3, 1, turn=0),
    generated(2, 1, turn=1, role="verifier"),
    generated(1, 2, turn=1, role="verifier", reason="stop"),
)


def test_masks_separate_generated_tokens_messages_and_windows():
    t = dialogue(*TWO_TURNS)
    assert t.generated_mask().tolist() == [True] * 4 + [False] * 3 + [True] * 3
    assert t.hot_mask().tolist() == [True] + [False] * 9
    assert (t.num_response_tokens, t.num_generated_tokens) == (10, 7)
    assert [t.window_tokens(step) for step in range(3)] == [3, 3, 1]
    assert t.rollout_logprobs().tolist() == [-0.5] * 4 + [0.0] * 3 + [-0.5] * 3
    assert t.token_ids.tolist() == [1, 2, *t.response_ids.tolist()]
    assert t.num_tokens == len(t.token_ids)


def test_turns_span_windows_and_end_in_the_step_of_their_last_token():
    t = dialogue(*TWO_TURNS)
    policy, verifier = t.turns()
    assert (policy.role, policy.start, policy.ended, policy.finish_reason, policy.last_step) == (
        "policy", 0, True, "stop", 1,
    )  # fmt: skip
    assert (verifier.role, verifier.start, tuple(verifier.token_ids.tolist()), verifier.ended) == ("verifier", 7, (0, 1, 0), True)
    assert [turn.index for turn in t.turn_ended(1)] == [0] and [turn.index for turn in t.turn_ended(2)] == [1]


def test_the_last_turn_is_open_until_it_stops_or_a_budget_ends_it():
    open_turn = generated(4, 0)
    assert not dialogue(open_turn).turns()[0].ended
    assert dialogue(open_turn, max_turn_tokens=4).turns()[0].ended
    assert dialogue(open_turn, budget=4).turns()[0].ended
    assert dialogue(generated(4, 0, reason="stop")).turns()[0].ended
    assert dialogue(generated(4, 0, reason="abort")).turns()[0].ended is False


def test_stop_finishes_a_response_and_environment_finishes_a_dialogue():
    stop = generated(3, 0, reason="stop")
    assert Trajectory(0, PROMPT, 0, 0, 9, [stop]).finished
    assert not dialogue(stop).finished
    assert dialogue(stop, env_done=True).finished and dialogue(stop, env_done=True).ended_naturally
    cut = dialogue(stop, out_of_room=True)
    assert cut.finished and not cut.ended_naturally
    used_up = dialogue(stop, message(2, 0, 0), generated(4, 0, turn=1), budget=9)
    assert used_up.finished and not used_up.ended_naturally


def test_after_a_message_the_next_turn_begins():
    t = dialogue(generated(3, 0, reason="stop"), message(2, 0, turn=0))
    assert (t.current_turn, t.num_turn_tokens, t.turn_finished) == (1, 0, False)
    assert [turn.index for turn in t.turns()] == [0]
    assert dialogue().current_turn == 0 and dialogue().turns() == []


segments = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 2), st.booleans(), st.sampled_from(["length", "stop", "abort"])),
    max_size=8,
)


@given(segments)
def test_masks_cover_the_response_and_agree_with_its_turns(parts):
    t = dialogue()
    for num_tokens, step, is_message, reason in parts:
        turn = t.current_turn
        t.segments.append(
            message(num_tokens, step, turn) if is_message else generated(num_tokens, step, turn=turn, reason=reason)
        )
    assert len(t.generated_mask()) == len(t.rollout_logprobs()) == t.num_response_tokens == len(t.hot_mask())
    assert sum(t.window_tokens(step) for step in range(3)) == t.num_generated_tokens == t.generated_mask().sum()
    of_turns = np.zeros(t.num_response_tokens, dtype=bool)
    for turn in t.turns():
        assert not of_turns[turn.start : turn.start + len(turn.token_ids)].any()
        of_turns[turn.start : turn.start + len(turn.token_ids)] = True
        assert t.response_ids[turn.start :][: turn.num_tokens].tolist() == turn.token_ids.tolist()
    assert np.array_equal(of_turns, t.generated_mask())


def test_a_dialogue_survives_a_checkpoint():
    t = dialogue(*TWO_TURNS, next_role="policy", max_turn_tokens=7, score=Score(1.0))
    t.turn_grades[0] = Score(1.0, "right")
    t.turn_scores[1] = Score(None, error="died", metrics={"seconds": 1.0})
    t.old_values = [np.array([0.1, 0.2], np.float32), np.array([0.3], np.float32)]
    state = json.loads(as_json(t))
    assert as_json(Trajectory.from_dict(state)) == as_json(t)
    assert [part.dtype for part in Trajectory.from_dict(state).old_values] == [np.float32] * 2


def test_a_state_without_deferred_steps_tells_by_its_values_what_has_trained():
    whole, by_window = dialogue(*TWO_TURNS), dialogue(*TWO_TURNS, old_values=[np.array([0.1] * 6, np.float32)])
    restored = []
    for t in (whole, by_window):
        state = json.loads(as_json(t))
        del state["deferred_steps"]
        restored.append(Trajectory.from_dict(state))
    assert [t.training_tokens(2) for t in restored] == [7, 1] and [t.training_tokens(3) for t in restored] == [7, 0]


@given(segments, st.frozensets(st.integers(0, 2)))
def test_every_generated_token_trains_in_one_step_with_tokens_or_at_the_end(parts, deferred):
    t = dialogue(deferred_steps=tuple(deferred))
    for num_tokens, step, is_message, reason in sorted(parts, key=lambda part: part[1]):
        turn = t.current_turn
        t.segments.append(
            message(num_tokens, step, turn) if is_message else generated(num_tokens, step, turn=turn, reason=reason)
        )
    steps = [step for step in range(4) if step == 3 or (step not in deferred and any(s.step == step for s in t.segments if s.generated))]
    trained = [id(s) for step in steps for s in t.training_segments(step)]
    assert sorted(trained) == sorted(id(s) for s in t.segments if s.generated)


def as_json(t):
    return json.dumps(t.to_dict(), default=np.ndarray.tolist)


def test_checkpoint_from_before_dialogues_loads():
    state = json.loads(as_json(Trajectory(3, PROMPT, 0, 0, 9, [generated(2, 0, reason="stop")], score=Score(0.5))))
    state["old_values"], state["left_out"] = [0.25, 0.5], [1]  # one list over all windows
    for name in ("dialogue", "max_turn_tokens", "next_role", "env_done", "out_of_room", "turn_grades", "turn_scores"):
        del state[name]
    for segment in state["segments"]:
        for name in ("turn", "role", "hot"):
            del segment[name]
    t = Trajectory.from_dict(state)
    assert [part.tolist() for part in (*t.old_values, *t.left_out)] == [[0.25, 0.5], [1]]
    assert t.finished and t.score == Score(0.5) and t.turns()[0].role == "policy"


def test_a_trajectory_as_of_a_step_has_no_later_tokens_and_no_later_end():
    segments = [Segment((5, 5), (-0.5, -0.5), 0, "length", 3), Segment((5,), (-0.5,), 1, "stop", 4)]
    t = Trajectory(0, Prompt("p", (1,)), 0, 0, 10, segments, dialogue=True, env_done=True)
    assert t.as_of(4) is t and t.as_of(5) is t
    earlier = t.as_of(3)
    assert earlier.num_response_tokens == 2 and not earlier.finished and earlier.old_values is t.old_values
    assert t.as_of(2).num_response_tokens == 0
    unfinished = Trajectory(1, Prompt("p", (1,)), 0, 0, 10, segments[:1])
    assert unfinished.as_of(3) is not unfinished and unfinished.as_of(3).segments == segments[:1]


def test_copy_shares_no_mutable_state():
    """A checkpoint is written from the copy while the next step runs."""
    trajectory = Trajectory(0, Prompt("p", (1,)), 0, 0, 10)
    copied = trajectory.copy()
    for one in fields(Trajectory):
        value = getattr(trajectory, one.name)
        assert not isinstance(value, list | dict) or value is not getattr(copied, one.name), one.name
