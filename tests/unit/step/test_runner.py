"""The stage runner: threads of the stages, the end of a run, and the error of a stalled run."""

import asyncio
import threading
import time

import pytest

from megatron_rl.config.schedule_facts import Facts, Overlap
from megatron_rl.schedule.graph import Resource, Stage
from megatron_rl.schedule.table import make_graph
from megatron_rl.step.runner import StageRunner

GRAPH = (
    Stage("fetch", Resource.rollout, "data", needs_before="weights"),
    Stage("work", Resource.trainer, "weights", "data"),
)


@pytest.fixture
def event_loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(5.0)  # what was cancelled ends
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
        assert step == 2 or started[step + 1].wait(5.0), (
            f"generation of step {step + 1} did not start during update_critic"
        )

    async def generate(step):
        started[step].set()

    async def evaluate(step):
        await asyncio.sleep(0.05)  # ends while the critic update runs

    graph = make_graph(Facts())
    actions = {stage.name: lambda step: None for stage in graph}
    actions |= {"generate": generate, "evaluate": evaluate, "update_critic": update_critic}
    runner = StageRunner(graph, event_loop, stall_timeout_s=5.0, on_span=lambda *span: None, heartbeat=lambda: None)
    runner.run(actions, 0, 2)


@pytest.mark.parametrize("overlap", [Overlap.nothing, Overlap.critic])
@pytest.mark.parametrize("moment", ["generate", "score", "advantages", "update_policy", "publish", "evaluate", "update_critic"])
def test_a_run_that_is_asked_to_stop_ends_with_all_models_after_the_same_step(event_loop, overlap, moment):
    """Whatever stage of step 2 is in progress; generation and evaluation are left, not waited for."""
    graph, asked, done = make_graph(Facts(overlap)), threading.Event(), []

    def action(name):
        async def on_the_loop(step):
            if asked_in(name, step):
                await asyncio.sleep(60)

        def plain(step):
            asked_in(name, step)
            done.append((name, step))

        return on_the_loop if name in ("generate", "score", "evaluate") else plain

    def asked_in(name, step):
        if (name, step) == (moment, 2):
            asked.set()
            runner.wake()
        return (name, step) == (moment, 2)

    runner = StageRunner(
        graph,
        event_loop,
        stall_timeout_s=20.0,
        on_span=lambda *span: None,
        heartbeat=lambda: None,
        stop_requested=asked.is_set,
    )
    runner.run({stage.name: action(stage.name) for stage in graph}, 0, 99)
    updates = [max(step for name, step in done if name == stage) for stage in ("update_policy", "update_critic")]
    began = moment in ("update_policy", "publish", "evaluate", "update_critic")
    assert updates == ([2, 2] if began else [1, 1])
    assert not any(step > 2 for _, step in done)


@pytest.mark.parametrize("asked_during", ["generate", "update_policy"])
def test_a_run_that_generates_ahead_ends_its_window_before_it_stops(event_loop, asked_during):
    """Its tokens belong to the state after the step that trains meanwhile: no later weights would sample them again."""
    graph, generated, trained = make_graph(Facts(Overlap.training)), [], []
    asked, training = threading.Event(), threading.Event()

    def ask(moment):
        if moment == asked_during:
            asked.set()
            runner.wake()

    async def generate(step):
        if step == 3:
            await asyncio.to_thread(training.wait, 5.0)
            ask("generate")
            await asyncio.sleep(0.2)
        generated.append(step)

    async def evaluate(step):
        if step == 1 and asked_during == "update_policy":  # the window of step 3 has not begun when the run is asked
            await asyncio.to_thread(asked.wait, 5.0)

    def update_policy(step):
        if step == 2:
            training.set()
            ask("update_policy")
            assert asked.wait(5.0)
        trained.append(step)

    actions = {stage.name: lambda step: None for stage in graph}
    actions |= {"generate": generate, "evaluate": evaluate, "update_policy": update_policy}
    runner = StageRunner(
        graph,
        event_loop,
        stall_timeout_s=5.0,
        on_span=lambda *span: None,
        heartbeat=lambda: None,
        stop_requested=asked.is_set,
    )
    runner.run(actions, 0, 99)
    assert trained[-1] == 2 and generated == [0, 1, 2, 3]
