"""The stage graph: what may overlap, in which order, and that every stage of every step runs once."""

import asyncio
import itertools
import threading
import time

import pytest

from megatron_rl.config.schema import Config, Mode, Placement
from megatron_rl.step.runner import StageRunner
from megatron_rl.step.stages import Frontier, Resource, Stage, check_graph, graph_of, step_graph


def simulate(mode, durations, steps, **pieces):
    """Run the frontier on a clock: [(name, step, start, end)]."""
    frontier, now, ends, log = Frontier(step_graph(mode, **pieces), 0, steps - 1), 0.0, {}, []
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


@pytest.mark.parametrize("mode", list(Mode))
def test_every_stage_of_every_step_runs_exactly_once(mode):
    log = simulate(mode, DURATIONS, 4)
    expected = sorted((stage.name, step) for stage in step_graph(mode) for step in range(4))
    assert sorted((name, step) for name, step, _, _ in log) == expected


def test_in_tppo_the_critic_update_runs_while_the_next_window_generates():
    log = simulate(Mode.tppo, DURATIONS, 3)
    for step in range(2):
        critic, generation = span(log, "update_critic", step), span(log, "generate", step + 1)
        assert min(critic[1], generation[1]) - max(critic[0], generation[0]) == 3.0


def test_in_sync_nothing_overlaps():
    log = [(start, end) for _, _, start, end in simulate(Mode.sync, DURATIONS, 3) if end > start]
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(log))


@pytest.mark.parametrize("mode", list(Mode))
def test_a_window_is_generated_with_the_weights_of_the_step_before_and_valued_by_its_critic(mode):
    log = simulate(mode, DURATIONS, 4)
    for step in range(1, 4):
        assert span(log, "generate", step)[0] >= span(log, "publish", step - 1)[1]
        assert span(log, "values", step)[0] >= span(log, "update_critic", step - 1)[1]


COLOCATED = DURATIONS | {"evaluate": 2.0, "sleep": 0.1, "reference_logprobs": 1.0, "score": 0.3, "checkpoint": 0.5}
DEVICES = {Resource.rollout, Resource.trainer}


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("critic", [True, False])
def test_colocated_servers_and_trainer_take_turns(mode, critic):
    if mode is Mode.tppo and not critic:
        return
    resources = {s.name: s.resource for s in step_graph(mode, critic=critic, reference=True, colocated=True)}
    log = simulate(mode, COLOCATED, 4, critic=critic, reference=True, colocated=True)
    assert sorted((name, step) for name, step, _, _ in log) == sorted((n, k) for n in resources for k in range(4))
    on_devices = sorted((start, end) for name, _, start, end in log if resources[name] in DEVICES and end > start)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(on_devices))


@pytest.mark.parametrize("mode", list(Mode))
def test_colocated_servers_sleep_exactly_while_the_trainer_works(mode):
    """Replays a run: what needs the servers finds them awake, what needs the trainer's memory finds them asleep."""
    asleep = False
    for name, _, _start, _end in sorted(simulate(mode, COLOCATED, 4, colocated=True), key=lambda entry: (entry[2], entry[3])):
        if name in ("sleep", "publish"):
            assert asleep == (name == "publish")
            asleep = name == "sleep"
        elif name in ("generate", "evaluate"):
            assert not asleep, name
        elif name in ("old_logprobs", "values", "update_policy", "update_critic", "checkpoint"):
            assert asleep, name


def test_the_graph_of_a_configuration_follows_its_placement():
    config = Config()
    assert "sleep" not in {stage.name for stage in graph_of(config)}
    config.rollout.placement = Placement.colocated
    graph = graph_of(config)
    check_graph(graph)
    assert "sleep" in {stage.name for stage in graph}
    assert all(stage.shares_devices == (stage.resource is not Resource.host) for stage in graph)


def test_evaluation_comes_before_the_next_generation():
    log = simulate(Mode.tppo, DURATIONS | {"evaluate": 2.0}, 3)
    assert span(log, "generate", 1)[0] >= span(log, "evaluate", 0)[1]


def test_broken_graphs_are_refused():
    host = Resource.host
    with pytest.raises(ValueError, match="no stage makes"):
        check_graph([Stage("a", host, ("x",), ("y",))])
    with pytest.raises(ValueError, match="wait for each other"):
        check_graph([Stage("a", host, ("x",), ("y",)), Stage("b", host, ("y",), ("x",))])
    with pytest.raises(ValueError, match="declared twice"):
        check_graph([Stage("a", host, ("x",)), Stage("b", host, ("x",))])


GRAPH = (
    Stage("fetch", Resource.rollout, ("data",), needs_previous=("weights",)),
    Stage("work", Resource.trainer, ("weights",), ("data",)),
)


@pytest.fixture
def event_loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def make_runner(event_loop, **options):
    settings = dict(stall_timeout_s=5.0, on_span=lambda *span: None, heartbeat=lambda: None) | options
    return StageRunner(GRAPH, event_loop, **settings)


def test_trainer_stages_run_on_the_calling_thread_and_coroutines_may_borrow_it(event_loop):
    threads, order = [], []

    async def fetch(step):
        borrowed = runner.call_on_trainer(lambda: threads.append(threading.current_thread()))
        await asyncio.wrap_future(borrowed)
        order.append(("fetch", step))

    def work(step):
        threads.append(threading.current_thread())
        order.append(("work", step))

    runner = make_runner(event_loop)
    runner.run({"fetch": fetch, "work": work}, 0, 2)
    assert set(threads) == {threading.current_thread()} and len(threads) == 6
    assert order == [(name, step) for step in range(3) for name in ("fetch", "work")]


def test_a_stage_without_an_action_is_refused(event_loop):
    with pytest.raises(ValueError, match="work"):
        make_runner(event_loop).run({"fetch": print}, 0, 1)


def test_a_failing_stage_ends_the_run_with_its_own_error(event_loop):
    async def fetch(step):
        raise LookupError("no servers")

    with pytest.raises(LookupError, match="no servers"):
        make_runner(event_loop).run({"fetch": fetch, "work": lambda step: None}, 0, 1)


def test_a_stall_names_the_stage_and_the_wait(event_loop, monkeypatch):
    monkeypatch.setattr("megatron_rl.step.runner.HEARTBEAT_S", 0.05)
    beats = []

    async def fetch(step):
        await asyncio.sleep(60)

    runner = make_runner(event_loop, stall_timeout_s=0.3, heartbeat=lambda: beats.append(time.time()))
    with pytest.raises(TimeoutError, match="fetch of step 0"):
        runner.run({"fetch": fetch, "work": lambda step: None}, 0, 0)
    assert len(beats) >= 3


def test_stop_after_opens_no_further_step(event_loop):
    done = []

    async def fetch(step):
        if step == 1:
            runner.stop_after(1)

    runner = make_runner(event_loop)
    runner.run({"fetch": fetch, "work": done.append}, 0, 99)
    assert done == [0, 1]


def test_generation_starts_while_the_calling_thread_is_inside_a_trainer_stage(event_loop):
    """The critic update waits here for the next window: it must not hold back the launch of it."""
    started = {step: threading.Event() for step in range(4)}

    def update_critic(step):
        assert step == 2 or started[step + 1].wait(5.0), f"generation of step {step + 1} did not start beside update_critic"

    async def generate(step):
        started[step].set()

    async def evaluate(step):
        await asyncio.sleep(0.05)  # ends while the critic update runs

    graph = step_graph(Mode.tppo)
    actions = {stage.name: lambda step: None for stage in graph}
    actions |= {"generate": generate, "evaluate": evaluate, "update_critic": update_critic}
    runner = StageRunner(graph, event_loop, stall_timeout_s=5.0, on_span=lambda *span: None, heartbeat=lambda: None)
    runner.run(actions, 0, 2)
