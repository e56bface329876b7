"""The stage table on a clock: laws over random durations, and a run whose end can be worked out by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schedule_facts import Facts, Overlap
from megatron_rl.desk.simulate.clock import StageLoad, run_clock
from megatron_rl.schedule.table import make_graph

NUM_STEPS = 4
SECONDS = {"generate": 4.0, "old_logprobs": 1.0, "values": 1.0, "update_policy": 2.0, "update_critic": 3.0}


def run(overlap, seconds=SECONDS, *, cores=0.0, wanted=0.0, **options):
    graph = make_graph(Facts(overlap, **options))
    return run_clock(graph, lambda one: StageLoad(seconds.get(one.stage.name, 0.0), wanted), NUM_STEPS, cores=cores)


def test_a_synchronous_step_is_the_sum_of_its_stages():
    assert run(Overlap.nothing)[-1].end_s == pytest.approx(NUM_STEPS * 11.0)


def test_the_critic_hides_behind_the_next_window():
    assert run(Overlap.critic)[-1].end_s == pytest.approx(NUM_STEPS * 8.0 + 3.0)


def test_a_window_that_is_generated_ahead_hides_behind_the_training_of_the_step_before():
    assert run(Overlap.training)[-1].end_s == pytest.approx(4.0 + NUM_STEPS * 7.0)


def test_servers_stand_still_while_weights_are_published_into_a_window():
    """A window of 9 s meets the publish of 2 s of the step before; the first one meets none."""
    seconds = SECONDS | {"generate": 9.0, "publish": 2.0}
    spans = {(span.name, span.step): span for span in run(Overlap.publish, seconds)}
    lengths = [spans["generate", step].end_s - spans["generate", step].start_s for step in range(1, NUM_STEPS + 1)]
    assert lengths == [pytest.approx(9.0)] + [pytest.approx(11.0)] * (NUM_STEPS - 1)
    assert all(spans["publish", step].end_s < spans["generate", step + 1].end_s for step in range(1, NUM_STEPS))


def test_on_shared_devices_nothing_overlaps():
    assert run(Overlap.critic, colocated=True)[-1].end_s == pytest.approx(NUM_STEPS * 11.0)


def test_on_full_cores_what_overlaps_takes_as_long_as_one_after_the_other():
    """Each stage wants all cores, so that an overlap gains nothing."""
    assert run(Overlap.critic, cores=2.0, wanted=2.0)[-1].end_s == pytest.approx(NUM_STEPS * 11.0)


def test_with_a_core_for_each_nothing_slows_down():
    assert run(Overlap.critic, cores=2.0, wanted=1.0)[-1].end_s == pytest.approx(NUM_STEPS * 8.0 + 3.0)


def test_on_full_cores_everything_is_slower_although_there_is_one_for_each():
    graph = make_graph(Facts())
    spans = run_clock(
        graph, lambda one: StageLoad(SECONDS.get(one.stage.name, 0.0), 1.0), NUM_STEPS, cores=2.0, overlap_rate=0.8
    )
    found = {(span.name, span.step): span for span in spans}
    critic, generate = found["update_critic", 1], found["generate", 2]
    assert critic.end_s - critic.start_s == pytest.approx(3.0 / 0.8)
    assert generate.end_s - generate.start_s == pytest.approx(4.0 + 3.0 / 0.8 - 3.0)
    assert found["update_policy", 1].end_s - found["update_policy", 1].start_s == pytest.approx(2.0)


def test_a_stage_that_continues_on_fewer_cores_is_slowed_down_less():
    """Two servers of a core each, one of them idle after a second; the critic wants two cores of three."""
    servers = StageLoad(1.0, 2.0, StageLoad(3.0, 1.0))
    graph = make_graph(Facts())
    loads = {"generate": servers, "update_critic": StageLoad(3.0, 2.0)}
    spans = run_clock(graph, lambda one: loads.get(one.stage.name, StageLoad(0.0)), NUM_STEPS, cores=3.0)
    found = {(span.name, span.step): span for span in spans}
    generate, critic = found["generate", 2], found["update_critic", 1]
    # Four cores of three are wanted until the first server is through, then three.
    assert generate.end_s - generate.start_s == pytest.approx(1.0 * 4 / 3 + 3.0)
    assert critic.end_s - critic.start_s == pytest.approx(1.0 * 4 / 3 + 2.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_stage_starts_with_its_products_made_and_its_resource_free(data):
    overlap = data.draw(st.sampled_from(Overlap))
    colocated = overlap < Overlap.training and data.draw(st.booleans())
    graph = make_graph(Facts(overlap, colocated=colocated, reference=data.draw(st.booleans())))
    cores = data.draw(st.sampled_from([0.0, 1.0, 2.0]))
    loads = {
        (stage.name, step): StageLoad(
            data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])), data.draw(st.sampled_from([0.0, 0.7, 1.5]))
        )
        for stage in graph
        for step in range(NUM_STEPS)
    }
    spans = run_clock(graph, lambda one: loads[one.stage.name, one.step], NUM_STEPS, cores=cores, between_s=0.125)
    found = {(span.name, span.step - 1): span for span in spans}
    assert len(spans) == len(found) == len(loads)
    makers = {product: stage for stage in graph for product in stage.products}
    for stage in graph:
        for step in range(NUM_STEPS):
            span = found[stage.name, step]
            assert span.end_s - span.start_s >= loads[stage.name, step].seconds - 1e-6
            for product, back in stage.waits_for:
                if step >= back:
                    made = found[makers[product].name, min(step - back, NUM_STEPS - 1)]
                    assert made.end_s <= span.start_s + 1e-6
    for resource in {one for stage in graph for one in stage.occupies}:
        own = [found[stage.name, step] for stage in graph if resource in stage.occupies for step in range(NUM_STEPS)]
        own.sort(key=lambda span: (span.start_s, span.end_s))
        assert all(a.end_s <= b.start_s + 1e-6 for a, b in pairwise(own))
