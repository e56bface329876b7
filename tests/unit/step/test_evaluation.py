"""Evaluations: their steps, responses and metrics, and the accuracy that ends a run."""

import asyncio
import itertools
import statistics
from types import SimpleNamespace

import pytest

from megatron_rl.config.schema import Config, EvalSetConfig
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rollout.generation import Sampling, trajectory_seed
from megatron_rl.step.evaluation import EvaluationServers, Evaluator, score_metrics

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(0,), seed=7)


class Bench:
    """An evaluator of some sets, by name: ``rewards[name][prompt][sample]``; None: it cannot be scored."""

    def __init__(self, rewards, *, goal=0.0, every_steps=2, sets=None):
        config = Config()
        config.run.num_steps, config.eval.every_steps, config.eval.stop_at_accuracy = 5, every_steps, goal
        if list(rewards) == [""]:
            config.data.eval_files = ["some.jsonl"]
        else:
            config.eval.sets = sets or {name: EvalSetConfig(files=["some.jsonl"]) for name in rewards}
        self.config, self.rewards = config, rewards
        self.calls, self.recorded, self.stops, self.requests = [], [], [], []
        prompts = {name: [Prompt(f"{name}:{i}", (1,)) for i in range(len(found))] for name, found in rewards.items()}
        self.seen = {}
        self.evaluator = Evaluator(
            config,
            prompts,
            rollout=SimpleNamespace(generate=self.generate),
            grader=SimpleNamespace(grade=self.grade, metrics=lambda trajectories: {"reward/seen": len(trajectories)}),
            start=lambda prompt, id: Trajectory(id, prompt, id, 0, 9),
            on_accuracy=lambda *seen: self.recorded.append(seen),
            stop_after=self.stops.append,
        )

    async def generate(self, trajectories, *, step, window_tokens, draw, kind):
        self.calls.append((kind, draw, [(t.prompt.id, t.id) for t in trajectories]))
        sampling = SAMPLING.drawn(draw)
        for t in trajectories:
            self.requests.append((f"{kind}-{t.id}", t.prompt.id, trajectory_seed(sampling.seed, t.id)))
            t.segments.append(Segment((5,), (-1.0,), 0, "stop", step))

    async def grade(self, trajectories, step):
        seen = {}
        for t in trajectories:
            sample = seen[t.prompt.id] = seen.get(t.prompt.id, -1) + 1
            name, index = t.prompt.id.split(":")
            t.score = Score(self.rewards[name][int(index)][sample])

    def run(self, step=1):
        return asyncio.run(self.evaluator.evaluate(step))


    def beside(self, *steps, fails=False):
        """What was added and warned of, with each evaluation begun before the one before was waited for."""
        added, warned = [], []

        async def run():
            for step in steps:
                await self.evaluator.idle()
                self.evaluator.begin(step, lambda *said: added.append(said), warned.append)
            await self.evaluator.idle(at_once=fails)

        asyncio.run(run())
        return added, warned


def alone(*rewards, **settings):
    """One response to each prompt of the set without a name."""
    return Bench({"": [[reward] for reward in rewards]}, **settings)


def test_evaluations_are_due_after_every_n_steps_and_after_the_last_one():
    assert [alone(1.0).evaluator.due(step) for step in range(5)] == [False, True, False, True, True]
    assert not any(Bench({}).evaluator.due(step) for step in range(5))


def test_accuracy_is_the_mean_of_the_responses_that_could_be_scored():
    bench = alone(1.0, 0.0, None, 1.0)
    metrics = asyncio.run(bench.evaluator.evaluate(1))
    error = statistics.stdev([1, 0, 1]) / 3**0.5
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3) and metrics["eval/num_unscored"] == 1
    assert metrics["eval/accuracy_stderr"] == pytest.approx(error)
    assert bench.recorded == [(2, pytest.approx(2 / 3), pytest.approx(error))]
    assert not [name for name in metrics if "pass@" in name]


@pytest.mark.parametrize(("goal", "step", "expected"), [(0.5, 1, [1]), (0.75, 1, []), (0.0, 1, []), (0.5, -1, [])])
def test_goal_accuracy_reached_in_training_ends_the_run(goal, step, expected):
    bench = alone(1.0, 0.0, goal=goal)
    bench.run(step)
    assert bench.stops == expected


def two_sets():
    sets = {
        "aime": EvalSetConfig(files=["a"], num_samples=4, temperature=0.6, top_p=0.95, num_prompts=2),
        "math.500": EvalSetConfig(files=["b"], top_k=20, temperature=1.0),
    }
    rewards = {"aime": [[1, 0, 0, 0], [1, 1, None, 0], [0, 0, 0, 0]], "math.500": [[1], [0]]}
    return Bench(rewards, sets=sets, goal=0.47)


def test_each_set_has_its_own_number_of_prompts_and_samples_and_is_drawn_in_its_own_way():
    bench = two_sets()
    metrics = bench.run()
    drawn = {kind: (draw.temperature, draw.top_p, draw.top_k, len(asked)) for kind, draw, asked in bench.calls}
    assert drawn == {"eval-aime": (0.6, 0.95, -1, 8), "eval-math.500": (1.0, 1.0, 20, 2)}
    assert metrics["eval/aime/accuracy"] == pytest.approx((1 / 4 + 2 / 3) / 2)
    assert metrics["eval/math.500/accuracy"] == 0.5 and metrics["eval/aime/num_unscored"] == 1
    assert metrics["eval/aime/pass@1"] == pytest.approx(metrics["eval/aime/accuracy"])
    assert metrics["eval/aime/pass@2"] == pytest.approx((2 / 4 + 1) / 2)
    assert metrics["eval/aime/pass@4"] == 1.0, "of the first prompt alone: the second has three scores"
    assert metrics["eval/aime/reward/seen"] == 8 and metrics["eval/reward/seen"] == 10


def test_all_prompts_of_all_sets_count_alike_in_the_accuracy_that_ends_a_run():
    bench = two_sets()
    metrics = bench.run()
    means = [1 / 4, 2 / 3, 1, 0]
    assert metrics["eval/accuracy"] == pytest.approx(statistics.fmean(means))
    assert metrics["eval/accuracy_stderr"] == pytest.approx(statistics.stdev(means) / 2)
    assert bench.stops == [1]


def test_every_response_has_its_own_request_and_seed_and_the_same_ones_in_the_next_evaluation():
    first, again = two_sets(), two_sets()
    first.run(1), again.run(3)
    assert len({rid for rid, _, _ in first.requests}) == len({seed for _, _, seed in first.requests}) == 10
    assert first.requests == again.requests


def test_the_samples_of_a_set_do_not_depend_on_other_sets_nor_the_first_ones_on_the_number_of_samples():
    def seeds(num_samples, *names):
        sets = {name: EvalSetConfig(files=["a"], num_samples=num_samples, temperature=1.0) for name in names}
        bench = Bench({name: [[1] * 4, [0] * 4] for name in names}, sets=sets)
        bench.run()
        found = {}
        for _, prompt, seed in bench.requests:
            found.setdefault(prompt, []).append(seed)
        return found

    both, one, fewer = seeds(4, "a", "b"), seeds(4, "b"), seeds(2, "a", "b")
    assert {name: both[name] for name in one} == one
    assert {name: found[:2] for name, found in both.items()} == fewer


def test_the_error_is_over_prompts_so_that_samples_that_agree_do_not_shrink_it():
    """32 equal samples of 4 prompts say as much as one each; counting responses, the error would be 5.7 times smaller."""
    once = score_metrics([[1], [0], [1], [0]])
    often = score_metrics([[1] * 32, [0] * 32, [1] * 32, [0] * 32])
    assert often["accuracy_stderr"] == once["accuracy_stderr"] > 0.28


def test_a_prompt_counts_once_however_many_of_its_responses_could_be_scored():
    for kept in itertools.product([1, 2, 5], repeat=2):
        found = score_metrics([[1.0] * kept[0], [0.0] * kept[1], []])
        assert found["accuracy"] == 0.5


def test_a_set_without_a_score_says_so_and_nothing_more():
    bench = Bench({"a": [[None]], "b": [[1]]})
    metrics = bench.run()
    assert metrics["eval/a/accuracy"] != metrics["eval/a/accuracy"] and metrics["eval/accuracy"] == 1.0
    assert "eval/a/accuracy_stderr" not in metrics and metrics["eval/a/num_unscored"] == 1


def test_background_evaluation_is_recorded_at_its_own_step():
    bench = alone(1.0)
    added, warned = bench.beside(1, 3)
    assert [step for step, *_ in added] == [2, 4] == [seen[0] for seen in bench.recorded] and not warned
    assert all(metrics["eval/accuracy"] == 1.0 for _, metrics, _ in added)


class _Fleet:
    """A service of servers for evaluation that ``live``."""

    urls, num_published = ["http://e:1"], 0

    def __init__(self, *live):
        self.live = [*live]
        self.num_live_servers = 1

    async def check_servers(self):
        return self.live.pop(0)

    def publish(self):
        self.num_published += 1


def test_without_its_servers_an_evaluation_is_left_out_and_training_goes_on():
    bench, rollout, warned, added = alone(1.0), _Fleet(1, 1, 0, 1), [], []

    async def hang(*args, **options):
        rollout.num_live_servers = 0
        await asyncio.sleep(30)

    async def run():
        def wait_for(coroutine):
            return asyncio.run_coroutine_threadsafe(coroutine, event_loop).result()

        event_loop, fleet = asyncio.get_running_loop(), EvaluationServers(rollout, wait_for, warned.append)
        for step in (1, 3, 5, 7):
            await asyncio.to_thread(fleet.take, step, bench.evaluator)
            bench.evaluator.move_to(SimpleNamespace(generate=hang if step == 3 else bench.generate))
            if fleet.has == step:
                bench.evaluator.begin(step, lambda *said: added.append(said), warned.append)
        await bench.evaluator.idle()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert [step for step, *_ in added] == [2, 8] and rollout.num_published == 3
    assert warned == [
        "the evaluation after step 4 is left out: its servers were lost",
        "the evaluation after step 6 is left out: none of http://e:1 (eval.urls) answers",
    ]


def test_failed_background_evaluation_is_a_warning_and_is_omitted():
    bench = alone(1.0)

    async def lost(*args, **options):
        raise UserError("all servers were lost")

    bench.evaluator.move_to(SimpleNamespace(generate=lost))
    added, warned = bench.beside(1)
    assert not added and warned == ["the evaluation after step 2 is left out: all servers were lost"]

    async def hang(*args, **options):
        await asyncio.sleep(30)

    bench.evaluator.move_to(SimpleNamespace(generate=hang))
    added, warned = bench.beside(1, fails=True)
    assert not added
