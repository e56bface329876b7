"""The mechanics of the step graph: broken graphs, precedence, and how far a step may run ahead of another."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schedule_facts import Facts, Overlap
from megatron_rl.schedule.graph import Frontier, Resource, Stage, StageRun, check_graph
from megatron_rl.schedule.table import make_graph
from tests.unit.schedule.old_stages import only_with


def test_broken_graphs_are_refused():
    host = Resource.host
    with pytest.raises(ValueError, match="no stage makes"):
        check_graph([Stage("a", host, "x", "y")])
    with pytest.raises(ValueError, match="wait for each other"):
        check_graph([Stage("a", host, "x", "y"), Stage("b", host, "y", "x")])
    with pytest.raises(ValueError, match="declared twice"):
        check_graph([Stage("a", host, "x"), Stage("b", host, "x")])


def test_stage_that_leads_to_no_end_of_the_step_is_rejected():
    """It could run, or be dropped, when its step's state is gone."""
    stages = [Stage("a", Resource.host, "x"), Stage("b", Resource.host, "y", "x"), Stage("c", Resource.host, "z", "x")]
    check_graph(stages, goals=["b", "c"])
    for next_step in ("", "z"):
        with pytest.raises(ValueError, match=r"\['c'\] lead to none of \['b'\]"):
            check_graph([replace(stages[0], needs_before=next_step), *stages[1:]], goals=["b"])


def test_a_circle_through_a_later_step_is_refused():
    trainer = Resource.trainer
    ahead = [Stage("a", trainer, "x", needs_before="y:2"), Stage("b", trainer, "y", needs_before="x:-1")]
    check_graph(ahead)
    with pytest.raises(ValueError, match="wait for each other"):
        check_graph([replace(ahead[0], needs_before="y:1"), ahead[1]])


def test_a_stage_may_wait_for_a_later_step_and_in_the_last_one_waits_for_its_own():
    graph = [Stage("a", Resource.host, "x", needs_before="x:2"), Stage("b", Resource.trainer, "y", "x", needs_before="x:-1")]
    log = simulate(Frontier(graph, 0, 2), lambda name, step: 1.0)
    assert [(name, step, start) for name, step, start, _ in log if name == "b"] == [("b", 0, 2.0), ("b", 1, 3.0), ("b", 2, 4.0)]


def test_need_with_a_distance_refers_to_an_earlier_step():
    stage = Stage("a", Resource.host, "x", needs="y z", needs_before="x w:3 v:-1")
    assert stage.waits_for == (("y", 0), ("z", 0), ("x", 1), ("w", 3), ("v", -1))


class TwoStepFrontier:
    """A scheduler that knows only this step and the step before: what the numbers of the graph replaced."""

    def __init__(self, graph, num_steps):
        self.graph, self.last_step, self.newest = graph, num_steps - 1, 0
        self.made = {(product, -1) for stage in graph for product in stage.products}
        self.open = [StageRun(stage, 0) for stage in graph]
        self.running = []

    @property
    def done(self):
        return not self.open and not self.running and self.newest >= self.last_step

    def ready(self):
        busy = {resource for run in self.running for resource in run.stage.occupies}
        candidates = list(self.open)
        if self.newest < self.last_step and not any(run.step < self.newest for run in self.open):
            candidates += [StageRun(stage, self.newest + 1) for stage in self.graph if not stage.needs]
        found = []
        for run in candidates:
            here = all((product, run.step) in self.made for product in run.stage.needs.split())
            before = all((product, run.step - 1) in self.made for product in run.stage.needs_before.split())
            if here and before and busy.isdisjoint(run.stage.occupies):
                busy |= run.stage.occupies
                found.append(run)
        return found

    def start(self, run):
        if run.step > self.newest:
            self.newest = run.step
            self.open += [StageRun(stage, run.step) for stage in self.graph]
        self.open.remove(run)
        self.running.append(run)

    def finish(self, run):
        self.running.remove(run)
        self.made.update((product, run.step) for product in run.stage.products)


def simulate(frontier, seconds):
    """Run a frontier on a clock; ``seconds(name, step)`` per stage. [(name, step, start, end)] in order of the starts."""
    now, ends, log = 0.0, {}, []
    while not frontier.done:
        for run in frontier.ready():
            frontier.start(run)
            ends[run] = now + seconds(run.stage.name, run.step)
            log.append((run.stage.name, run.step, now, ends[run]))
        run = min(ends, key=ends.get)
        now = ends.pop(run)
        frontier.finish(run)
    return log


OPTIONS = [
    dict(zip(("critic", "reference", "process_rewards", "colocated"), chosen))
    for chosen in itertools.product([False, True], repeat=4)
]


IN_STEP = (Overlap.nothing, Overlap.critic)
"""Modes in which no step is generated before the one before has trained."""


@pytest.mark.parametrize("overlap", IN_STEP)
@settings(max_examples=25)
@given(st.sampled_from(OPTIONS), st.randoms(use_true_random=False))
def test_distances_of_one_give_the_order_of_two_open_steps(overlap, options, rng):
    graph, seconds = make_graph(Facts(overlap, **options)), random_seconds(rng)
    found = simulate(Frontier(graph, 0, 5), seconds)
    assert found == simulate(TwoStepFrontier(graph, 6), seconds)


def random_seconds(rng: random.Random):
    known = {}
    return lambda name, step: known.setdefault((name, step), rng.choice([0.0, 0.1, 1.0, 3.0, 10.0]))


RECORDED = {
    (Overlap.critic, False): """
        generate0 score0 values0 old_logprobs0 advantages0 update_policy0 publish0 evaluate0 update_critic0 generate1
        checkpoint0 score1 values1 record0 old_logprobs1 advantages1 update_policy1 publish1 evaluate1 update_critic1
        checkpoint1 record1
    """,
    (Overlap.nothing, False): """
        generate0 score0 values0 old_logprobs0 advantages0 update_policy0 publish0 evaluate0 update_critic0
        checkpoint0 generate1 record0 values1 score1 old_logprobs1 advantages1 update_policy1 publish1 evaluate1
        update_critic1 checkpoint1 record1
    """,
    (Overlap.training, False): """
        generate0 score0 values0 generate1 old_logprobs0 score1 advantages0 update_policy0 publish0 evaluate0
        update_critic0 checkpoint0 record0 values1 old_logprobs1 advantages1 update_policy1 publish1 evaluate1
        update_critic1 checkpoint1 record1
    """,
    (Overlap.critic, True): """
        generate0 sleep0 score0 values0 old_logprobs0 advantages0 update_policy0 update_critic0 checkpoint0 publish0
        evaluate0 record0 generate1 sleep1 score1 values1 old_logprobs1 advantages1 update_policy1 update_critic1
        checkpoint1 publish1 evaluate1 record1
    """,
}
"""Order of the starts over two steps in which every stage takes a second."""


@pytest.mark.parametrize(("overlap", "colocated"), RECORDED)
def test_the_order_of_the_starts_is_as_recorded(overlap, colocated):
    recorded = RECORDED[(overlap, colocated)].split()
    graph = only_with({start[:-1] for start in recorded}, make_graph(Facts(overlap, colocated=colocated)))
    log = simulate(Frontier(graph, 0, 1), lambda name, step: 1.0)
    assert [f"{name}{step}" for name, step, _, _ in log] == recorded


def running_ahead(distance, overlap=Overlap.critic):
    """The step's graph, but generation waits for weights and slots of ``distance`` steps before."""
    words = f"served_weights:{distance} pool:{distance}"
    return [replace(s, needs_before=words) if s.name == "generate" else s for s in make_graph(Facts(overlap, reference=True))]


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_generation_runs_as_many_steps_ahead_as_the_distance_says(distance):
    """It starts step k once the weights of step k - distance are served, and never earlier."""
    slow_training = {"update_policy": 9.0, "update_critic": 3.0, "generate": 1.0}
    log = simulate(Frontier(running_ahead(distance), 0, 7), lambda name, step: slow_training.get(name, 0.1))
    starts = {step: start for name, step, start, _ in log if name == "generate"}
    published = {step: end for name, step, _, end in log if name == "publish"}
    leads = [step - sum(end <= start for end in published.values()) for step, start in starts.items()]
    assert max(leads) == distance - 1 and all(starts[k] >= published[k - distance] for k in range(distance, 8))
    assert all(starts[k] < published[k - distance + 1] for k in range(distance, 8))


@settings(max_examples=25)
@given(st.integers(1, 4), st.sampled_from(IN_STEP), st.randoms(use_true_random=False))
def test_whatever_the_distance_every_stage_runs_once_and_finds_what_it_waits_for(distance, overlap, rng):
    graph, num_steps = running_ahead(distance, overlap), 7
    log = simulate(Frontier(graph, 0, num_steps - 1), random_seconds(rng))
    assert Counter((name, step) for name, step, _, _ in log) == {
        (s.name, k): 1 for s in graph for k in range(num_steps)
    }
    spans = {(name, step): (start, end) for name, step, start, end in log}
    maker = {product: stage.name for stage in graph for product in stage.products}
    for stage, step in itertools.product(graph, range(num_steps)):
        for product, back in stage.waits_for:
            if step >= back:
                assert spans[maker[product], step - back][1] <= spans[stage.name, step][0]
    for resource in Resource:
        lane = sorted(spans[s.name, k] for s in graph for k in range(num_steps) if s.resource is resource)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(lane))


def test_table_needs_at_most_the_previous_step():
    assert {distance for stage in make_graph(Facts(reference=True, process_rewards=True)) for _, distance in stage.waits_for} == {0, 1}
