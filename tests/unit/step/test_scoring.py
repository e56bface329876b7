"""Responses and the turns of dialogues are scored once, in the step in which they end."""

import asyncio

import pytest

from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory, message_segment
from megatron_rl.environments.pag import Pag
from megatron_rl.rewards.registry import RewardError
from megatron_rl.step.scoring import ResponseScorer

WORDS = {1: "seven", 2: "The answer is wrong", 3: "eight", 4: "The answer is correct", 9: ""}


def decode(token_ids):
    return " ".join(WORDS[t] for t in token_ids).strip()


class Rewards:
    """Right is the prompt's answer; remembers what it was asked."""

    def __init__(self, lost=()):
        self.asked = []
        self.lost = lost

    async def score_many(self, items):
        self.asked += [item.response for item in items]
        return [
            Score(None, error="died") if item.response in self.lost else Score(float(item.response == item.answer))
            for item in items
        ]


def response(token, reason="stop", id=0):
    return Trajectory(
        id, Prompt("p", (9,), text="3 + 5", answer="eight"), 0, 0, 50, [Segment((token,), (0.0,), 0, reason, 0)]
    )


def talk(turns, *, done, steps=None):
    """turns: one token each, policy and verifier in turn; turn k was generated in steps[k]."""
    steps = steps or [0] * len(turns)
    segments = []
    for index, (token, step) in enumerate(zip(turns, steps)):
        if index:
            segments.append(message_segment((9,), weight_version=0, step=step, turn=index - 1))
        role = ("policy", "verifier")[index % 2]
        segments.append(Segment((token,), (0.0,), 0, "stop", step, index, role))
    prompt = Prompt("p", (9,), text="3 + 5", answer="eight")
    return Trajectory(0, prompt, 0, 0, 50, segments, dialogue=True, env_done=done)


def grade(grader, trajectories, step=0):
    return asyncio.run(grader.grade(trajectories, step))


def test_only_finished_responses_are_graded_and_only_once():
    rewards = Rewards()
    grader = ResponseScorer(RewardConfig(), rewards, decode)
    group = [response(3), response(1, id=1), response(3, "length", id=2)]
    grade(grader, group)
    grade(grader, group)
    assert rewards.asked == ["eight", "seven"] and [t.score and t.score.value for t in group] == [1.0, 0.0, None]


def test_a_dialogue_is_rewarded_turn_by_turn_with_the_bonus_of_a_good_revision():
    grader = ResponseScorer(RewardConfig(), Rewards(), decode, Pag())
    done = talk([1, 2, 3, 4], done=True)
    grade(grader, [done])
    assert {turn: score.value for turn, score in done.turn_scores.items()} == {0: 0.0, 1: 1.0, 2: 2.0, 3: 1.0}
    assert done.score.value == 1.0
    metrics = grader.metrics([done])
    assert metrics["dialogue/first_accuracy"] == 0 and metrics["dialogue/final_accuracy"] == 1


def test_turns_are_graded_in_the_window_in_which_they_end():
    """The first answer's reward is there when its tokens are trained, and is not asked for again later."""
    rewards = Rewards()
    grader = ResponseScorer(RewardConfig(), rewards, decode, Pag())
    early = talk([1], done=False)
    grade(grader, [early], step=0)
    assert early.turn_scores[0].value == 0.0 and early.score is None
    late = talk([1, 2, 3, 4], done=True, steps=[0, 1, 1, 1])
    late.turn_grades, late.turn_scores = dict(early.turn_grades), dict(early.turn_scores)
    grade(grader, [late], step=1)
    assert rewards.asked == ["seven", "eight"] and sorted(late.turn_scores) == [0, 1, 2, 3]


def test_a_turn_that_cannot_be_graded_leaves_its_verdict_unscored():
    grader = ResponseScorer(RewardConfig(max_error_rate=1.0), Rewards(lost=("seven",)), decode, Pag())
    done = talk([1, 4], done=True)
    grade(grader, [done])
    assert done.turn_scores[0].value is None and done.turn_scores[1].value is None and done.score.value is None


def test_too_many_failures_stop_the_run():
    with pytest.raises(RewardError, match="could not be scored"):
        grade(ResponseScorer(RewardConfig(), Rewards(lost=("eight",)), decode), [response(3)])
