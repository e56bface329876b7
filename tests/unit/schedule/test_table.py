"""The table of stages: what may overlap, that every stage of every step runs once, and who shares the table."""

import itertools
from dataclasses import fields
from pathlib import Path

import pytest

import megatron_rl
from megatron_rl.config.schedule_facts import Facts, Overlap, facts_of
from megatron_rl.config.schema import Config, Mode, Placement, WeightUpdate
from megatron_rl.errors import DataError
from megatron_rl.schedule.graph import Frontier, Resource, check_graph
from megatron_rl.schedule.table import (
    GENERATE,
    KEEPER,
    LAST,
    OLD_LOGPROBS,
    PUBLISH,
    ROWS,
    RUN_PRODUCTS,
    UPDATE_CRITIC,
    UPDATE_POLICY,
    make_graph,
    row_of,
    table_markdown,
)
from megatron_rl.step.state import StepState


def simulate(overlap, durations, steps, **models):
    """Run the frontier on a clock: [(name, step, start, end)]."""
    frontier, now, ends, log = Frontier(make_graph(Facts(overlap, **models)), 0, steps - 1), 0.0, {}, []
    while not frontier.done:
        for run in frontier.ready():
            frontier.start(run)
            ends[run] = now + durations.get(run.stage.name, 0.0)
            log.append((run.stage.name, run.step, now, ends[run]))
        run = min(ends, key=ends.get)
        now = ends.pop(run)
        frontier.finish(run)
    return log


DURATIONS = {
    "generate": 4.0,
    "old_logprobs": 1.0,
    "values": 1.0,
    "update_policy": 2.0,
    "publish": 0.5,
    "update_critic": 3.0,
}


def span(log, name, step):
    return next((start, end) for n, s, start, end in log if (n, s) == (name, step))


@pytest.mark.parametrize("overlap", list(Overlap))
def test_every_stage_of_every_step_runs_exactly_once(overlap):
    log = simulate(overlap, DURATIONS, 4)
    expected = sorted((stage.name, step) for stage in make_graph(Facts(overlap)) for step in range(4))
    assert sorted((name, step) for name, step, _, _ in log) == expected


def test_in_tppo_the_critic_update_runs_while_the_next_window_generates():
    log = simulate(Overlap.critic, DURATIONS, 3)
    for step in range(2):
        critic, generation = span(log, "update_critic", step), span(log, "generate", step + 1)
        assert min(critic[1], generation[1]) - max(critic[0], generation[0]) == 3.0


def test_each_model_comes_to_the_device_once_a_step():
    """The critic from its update to its next values, then the policy until it is published: two turns, where they were four."""
    models = {"values": "critic", "update_critic": "critic", "old_logprobs": "policy", "update_policy": "policy", "publish": "policy"}
    log = simulate(Overlap.critic, DURATIONS | {"score": 1.5}, 6)
    turns = [key for key, _ in itertools.groupby(models[name] for name, *_ in log if name in models)]
    assert turns == ["critic", "policy"] * 6 + ["critic"]


def test_in_sync_nothing_overlaps():
    log = [(start, end) for _, _, start, end in simulate(Overlap.nothing, DURATIONS, 3) if end > start]
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(log))


@pytest.mark.parametrize("overlap", list(Overlap))
def test_a_window_is_generated_with_the_weights_of_the_step_before_and_valued_by_its_critic(overlap):
    """With windows ahead with those of the step before that, whose training goes on meanwhile."""
    log, lag = simulate(overlap, DURATIONS, 4), 1 + Facts(overlap).ahead
    for step in range(1, 4):
        if step >= lag:
            assert span(log, "generate", step)[0] >= span(log, "publish", step - lag)[1]
        assert span(log, "values", step)[0] >= span(log, "update_critic", step - 1)[1]


def test_in_async_a_step_takes_as_long_as_the_longer_half_and_the_publish():
    """The trainer has 7 s a step, the servers 4 or 9; between two windows both wait for the publish of 0.5 s."""
    for generate_s, step_s in ((4.0, 7.5), (9.0, 9.5)):
        log = simulate(Overlap.training, DURATIONS | {"generate": generate_s}, 8)
        published = [end for name, _, _, end in log if name == "publish"]
        assert [later - one for one, later in itertools.pairwise(published[1:-1])] == [pytest.approx(step_s)] * 5


@pytest.mark.parametrize("critic", [True, False])
def test_in_flight_a_publish_waits_for_no_window_but_for_an_evaluation(critic):
    seconds = DURATIONS | {"generate": 9.0, "evaluate": 6.0}
    log = simulate(Overlap.publish, seconds, 6, critic=critic)
    for step in range(1, 4):
        publish, ahead, evaluation = span(log, "publish", step), span(log, "generate", step + 1), span(log, "evaluate", step)
        assert ahead[0] <= publish[0] and publish[1] < ahead[1] <= evaluation[0] <= span(log, "generate", step + 2)[0]
        assert evaluation[1] <= span(log, "publish", step + 1)[0]
        assert span(log, "generate", step + 2)[0] >= span(log, "publish", step)[1]


def test_async_without_staleness_is_tppo():
    config = Config()
    config.schedule.mode, config.schedule.max_staleness = Mode.async_, 0
    assert make_graph(facts_of(config)) == make_graph(facts_of(Config()))
    config.schedule.max_staleness = 1
    assert make_graph(facts_of(config)) == make_graph(Facts(Overlap.training))
    config.schedule.weight_update = WeightUpdate.in_flight
    assert make_graph(facts_of(config)) == make_graph(Facts(Overlap.publish))
    config.schedule.max_staleness = 0
    assert make_graph(facts_of(config)) == make_graph(facts_of(Config()))


@pytest.mark.parametrize("overlap", [Overlap.training, Overlap.publish])
@pytest.mark.parametrize("staleness", range(1, 9))
def test_a_window_is_generated_with_weights_that_are_exactly_as_old_as_stated(overlap, staleness):
    """Between windows exactly; in flight at most. At the end of a run no stage waits for a step that does not come."""
    log = simulate(overlap, DURATIONS, 14, max_staleness=staleness)
    assert len(log) == 14 * len(make_graph(Facts(overlap)))
    for step in range(14):
        begins = span(log, "generate", step)[0]
        published = [other for other in range(14) if span(log, "publish", other)[1] <= begins]
        assert len(published) >= step - staleness
        if overlap is Overlap.training:
            assert len(published) == max(step - staleness, 0)


@pytest.mark.parametrize("overlap", list(Overlap))
def test_with_the_critic_first_the_policy_waits_for_its_new_values(overlap):
    log = simulate(overlap, DURATIONS | {"updated_values": 1.0}, 4, critic_first=True)
    assert sorted((name, step) for name, step, _, _ in log) == sorted(
        (stage.name, step) for stage in make_graph(Facts(overlap, critic_first=True)) for step in range(4)
    )
    for step in range(4):
        critic, again, policy = (span(log, name, step) for name in ("update_critic", "updated_values", "update_policy"))
        assert critic[1] <= again[0] < again[1] <= policy[0]


COLOCATED = DURATIONS | {"evaluate": 2.0, "sleep": 0.1, "reference_logprobs": 1.0, "score": 0.3, "checkpoint": 0.5}
DEVICES = {Resource.rollout, Resource.trainer}


@pytest.mark.parametrize("overlap", [Overlap.nothing, Overlap.critic])
@pytest.mark.parametrize("critic", [True, False])
def test_colocated_servers_and_trainer_take_turns(overlap, critic):
    resources = {s.name: s.resource for s in make_graph(Facts(overlap, critic=critic, reference=True, colocated=True))}
    log = simulate(overlap, COLOCATED, 4, critic=critic, reference=True, colocated=True)
    assert sorted((name, step) for name, step, _, _ in log) == sorted((n, k) for n in resources for k in range(4))
    on_devices = sorted((start, end) for name, _, start, end in log if resources[name] in DEVICES and end > start)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(on_devices))


@pytest.mark.parametrize("overlap", [Overlap.nothing, Overlap.critic])
def test_colocated_servers_sleep_exactly_while_the_trainer_works(overlap):
    """Replays a run: what needs the servers finds them awake, what needs the trainer's memory finds them asleep."""
    asleep = False
    for name, _, _start, _end in sorted(
        simulate(overlap, COLOCATED, 4, colocated=True), key=lambda entry: (entry[2], entry[3])
    ):
        if name in ("sleep", "publish"):
            assert asleep == (name == "publish")
            asleep = name == "sleep"
        elif name in ("generate", "evaluate"):
            assert not asleep, name
        elif name in ("old_logprobs", "values", "update_policy", "update_critic", "checkpoint"):
            assert asleep, name


def test_the_graph_of_a_configuration_follows_its_placement():
    config = Config()
    assert "sleep" not in {stage.name for stage in make_graph(facts_of(config))}
    config.rollout.placement = Placement.colocated
    graph = make_graph(facts_of(config))
    check_graph(graph)
    assert "sleep" in {stage.name for stage in graph}
    assert all(stage.shares_devices == (stage.resource is not Resource.host) for stage in graph)


def test_evaluation_comes_before_the_next_generation():
    log = simulate(Overlap.critic, DURATIONS | {"evaluate": 2.0}, 3)
    assert span(log, "generate", 1)[0] >= span(log, "evaluate", 0)[1]


def test_every_product_is_a_field_of_the_steps_state_or_outlives_the_step():
    state = {field.name for field in fields(StepState)}
    products = {product for row in ROWS for product in row.makes.split()}
    assert not state & set(RUN_PRODUCTS)
    assert products <= state | set(RUN_PRODUCTS) and set(RUN_PRODUCTS) <= products


def test_products_needed_from_the_previous_step_outlive_a_step():
    needed = {word for row in ROWS for overlap in Overlap for word in row.before_of(overlap).replace("?", "").split()}
    assert {word.partition(":")[0] for word in needed} <= set(RUN_PRODUCTS)


def test_the_readme_shows_the_table():
    readme = (Path(megatron_rl.__file__).parents[1] / "README.md").read_text()
    assert table_markdown() in readme, (
        "README.md shows another table than schedule/table.py; put in what "
        "`python -c 'from megatron_rl.schedule.table import *; print(table_markdown())'` prints"
    )


def test_an_unknown_stage_is_an_error_that_lists_the_known_ones():
    with pytest.raises(DataError, match=rf"no stage is called 'rerank'; the table .* has {', '.join(row.name for row in ROWS)}"):
        row_of("rerank")


def test_facts_that_rows_name_exist():
    for row in ROWS:
        row.exists(Facts())  # AttributeError for a fact that does not exist


def test_the_stages_that_readers_name_are_rows():
    for name in (GENERATE, OLD_LOGPROBS, UPDATE_POLICY, PUBLISH, UPDATE_CRITIC, KEEPER, LAST):
        assert row_of(name).name == name


def test_windows_ahead_on_shared_devices_are_refused():
    with pytest.raises(ValueError, match="overlap=training needs devices that servers and trainer do not share"):
        make_graph(Facts(Overlap.training, colocated=True))
