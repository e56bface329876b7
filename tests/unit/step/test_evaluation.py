"""When a run evaluates, what it remembers of it, and when an accuracy ends the run."""

import asyncio
from types import SimpleNamespace

import pytest

from megatron_rl.config.schema import Config
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.step.evaluation import Evaluator


def evaluator(rewards, *, goal=0.0, every_steps=2):
    """Response i gets rewards[i]; None: it cannot be scored. Also what was recorded, and the steps that ended the run."""
    config = Config()
    config.run.num_steps, config.eval.every_steps, config.eval.stop_at_accuracy = 5, every_steps, goal

    async def generate(trajectories, **settings):
        for trajectory in trajectories:
            trajectory.segments.append(Segment((5,), (-1.0,), 0, "stop", settings["step"]))

    async def grade(trajectories, step):
        for trajectory in trajectories:
            trajectory.score = Score(rewards[trajectory.id])

    recorded, stops = [], []
    found = Evaluator(
        config,
        [Prompt(str(i), (1,)) for i in range(len(rewards))],
        rollout=SimpleNamespace(generate=generate),
        grader=SimpleNamespace(grade=grade, metrics=lambda trajectories: {}),
        start=lambda prompt, id: Trajectory(id, prompt, id, 0, 9),
        recorder=SimpleNamespace(evaluated=lambda *seen: recorded.append(seen)),
        stop_after=stops.append,
    )
    return found, recorded, stops


def test_evaluations_are_due_after_every_n_steps_and_after_the_last_one():
    assert [evaluator([1.0])[0].due(step) for step in range(5)] == [False, True, False, True, True]
    assert not any(evaluator([])[0].due(step) for step in range(5))


def test_accuracy_is_the_mean_of_the_responses_that_could_be_scored():
    found, recorded, _ = evaluator([1.0, 0.0, None, 1.0])
    metrics = asyncio.run(found.evaluate_if_due(1))
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3) and metrics["eval/num_unscored"] == 1
    assert recorded == [(2, pytest.approx(2 / 3))]


@pytest.mark.parametrize(("goal", "step", "expected"), [(0.5, 1, [1]), (0.75, 1, []), (0.0, 1, []), (0.5, -1, [])])
def test_an_accuracy_that_is_reached_in_training_ends_the_run(goal, step, expected):
    found, _, stops = evaluator([1.0, 0.0], goal=goal)
    asyncio.run(found.evaluate(step))
    assert stops == expected
