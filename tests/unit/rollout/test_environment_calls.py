"""Laws of environments that wait: no window waits for them for ever, nothing is asked twice, and late replies join later."""

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from megatron_rl.config.schema import EnvironmentConfig
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.trajectory import Prompt, Score, Trajectory
from megatron_rl.environments.base import Branch, Ended, EnvironmentFault, Message
from megatron_rl.rollout.environment_calls import EnvironmentCalls, wait_until_started
from megatron_rl.rollout.generation import Dialogue, GenerationPlan
from megatron_rl.rollout.windows import WindowGenerator
from megatron_rl.step.metrics import rollout_metrics
from tests.unit.rollout.test_windows import SAMPLING, Engine, Talk, decode, encode, new_trajectory


class Tool(Talk):
    """Answers ``num_turns`` - 1 turns, each after the event of its episode is set; counts its calls."""

    def __init__(self, num_turns=3, ready=True, **options):
        super().__init__(num_turns=num_turns, stop_strings=(), **options)
        self.ready, self.asked, self.stopped = ready, [], []
        self.events: dict[str, asyncio.Event] = {}

    async def respond(self, prompt, turns, episode):
        self.asked.append((episode, len(turns)))
        event = self.events.setdefault(episode, asyncio.Event())
        if self.ready:
            event.set()
        await event.wait()
        return super().respond(prompt, turns)

    def stop(self, episode):
        self.stopped.append(episode)


def plan_of(environment, **limits):
    calls = EnvironmentCalls(environment, EnvironmentConfig(**limits), in_windows="step_wait_s" in limits)
    return GenerationPlan(SAMPLING, decode, dialogue=Dialogue(calls, encode))


@contextmanager
def background_loop():
    event_loop = asyncio.new_event_loop()
    thread = threading.Thread(target=event_loop.run_forever)
    thread.start()
    try:
        yield event_loop
    finally:
        event_loop.call_soon_threadsafe(event_loop.stop)
        thread.join()
        event_loop.close()


async def window(plan, trajectories, step=0, num_tokens=100, kind="train", open_row=None, **engine):
    made = WindowGenerator(Engine(**engine), None, plan, step=step, num_tokens=num_tokens, weight_version=1, kind=kind)
    await asyncio.wait_for(made.generate(trajectories, open_row=open_row), 20)


def test_an_environment_that_answers_in_time_gives_the_same_tokens_as_one_that_need_not_wait():
    def tokens(environment):
        t = new_trajectory(budget=60, max_turn_tokens=5)
        asyncio.run(window(plan_of(environment), [t]))
        return t.response_ids.tolist(), t.generated_mask().tolist(), t.env_done

    assert tokens(Tool()) == tokens(Talk(stop_strings=()))


def test_a_waiting_dialogue_does_not_block_the_step_and_its_reply_joins_in_a_later_window():
    async def main():
        tool = Tool(num_turns=2, ready=False)
        plan = plan_of(tool, step_wait_s=0.1)
        slow = new_trajectory(id=1, budget=60, max_turn_tokens=4)
        await window(plan, [slow, new_trajectory(id=2, dialogue=False)])
        assert slow.turn_finished and not slow.finished and slow.segments[-1].generated
        before = slow.num_response_tokens
        tool.events["train-1"].set()
        await asyncio.sleep(0)
        await window(plan, [slow], step=1)
        assert slow.finished and slow.num_response_tokens > before
        # The first call was continued, and the second one is for the second turn.
        assert tool.asked == [("train-1", 1), ("train-1", 2)]
        assert {s.step for s in slow.segments[1:]} == {1}
        # The wait began in the first window (whose clock starts before the call's), and joins the metrics of the reply's step.
        assert [step for step, _ in slow.waits.values()] == [1, 1] and slow.waits[0][1] > 0.05 > slow.waits[1][1]
        metrics = rollout_metrics([slow], step=1)
        assert metrics["time/tool_s_max"] == slow.waits[0][1] and metrics["rollout/waiting_share"] == 0
        assert metrics["rollout/tokens_verifier"] + metrics["rollout/tokens_environment"] == slow.num_response_tokens - before
        first = rollout_metrics([slow.as_of(0)], step=0)
        assert first["rollout/waiting_share"] == 1 and "time/tool_s_max" not in first
        assert "waits" not in slow.to_dict()

    asyncio.run(main())


def test_a_step_in_which_every_dialogue_waits_goes_on_until_a_token_is_there():
    async def main():
        tool = Tool(num_turns=2, ready=False)
        plan = plan_of(tool, step_wait_s=0.05)
        t = new_trajectory(id=1, budget=60, max_turn_tokens=4)
        await window(plan, [t])
        asyncio.get_running_loop().call_later(0.3, tool.events["train-1"].set)
        began_s = asyncio.get_running_loop().time()
        await window(plan, [t], step=1)
        assert asyncio.get_running_loop().time() - began_s > 0.25 and t.window_tokens(1) > 0

    asyncio.run(main())


@pytest.mark.parametrize("limit", ["call_timeout_s", "episode_timeout_s"])
def test_a_late_reply_ends_the_dialogue_unscored_and_names_the_limit(limit):
    async def main():
        tool = Tool(ready=False)
        t = new_trajectory(id=4, budget=60, max_turn_tokens=4)
        await window(plan_of(tool, **{limit: 0.1}), [t])
        assert t.finished and t.env_done and t.score.value is None
        assert f"environment.{limit}" in t.score.error and "train-4" in t.score.error
        assert tool.stopped == ["train-4"]

    asyncio.run(main())


def test_an_environment_may_end_a_dialogue_with_a_score_or_a_text_for_the_reward():
    class Judge(Talk):
        def respond(self, prompt, turns):
            return Ended(Score(0.5)) if prompt.id == "p" else Ended(graded_text="7")

    one, other = (new_trajectory(id=i, budget=60, max_turn_tokens=4) for i in (1, 2))
    other.prompt = Prompt("q", (1,))
    asyncio.run(window(plan_of(Judge(num_turns=9, stop_strings=())), [one, other]))
    assert one.score == Score(0.5) and one.env_done
    assert other.score is None and other.graded_text == "7"


def test_an_environment_that_opens_writes_the_prompt_before_the_first_turn():
    class Opens(Tool):
        opens = True

        async def respond(self, prompt, turns, episode):
            return Message(token_ids=(5, 4, 3)) if not turns else None

    t = new_trajectory(id=3, budget=9)
    asyncio.run(window(plan_of(Opens()), [t]))
    assert t.prompt.token_ids == (5, 4, 3) and t.opened and len(t.turns()) == 1 and t.env_done
    again = Trajectory.from_dict(t.to_dict())
    assert again.opened and again.prompt.token_ids == (5, 4, 3)


def test_a_program_whose_turn_is_cut_by_the_budget_may_still_leave_a_result():
    class Program(Tool):
        opens = True

        def __init__(self, reply):
            super().__init__()
            self.reply = reply

        async def respond(self, prompt, turns, episode):
            return self.reply if turns else Message(token_ids=(1,))

    for reply, score, stopped in ((Ended(Score(0.5)), Score(0.5), []), (Message("more"), None, ["train-7"])):
        program, t = Program(reply), new_trajectory(id=7, budget=3, max_turn_tokens=9)
        engine = Engine(end_weight=0.0)
        made = WindowGenerator(engine, None, plan_of(program), step=0, num_tokens=9, weight_version=1, kind="train")
        asyncio.run(made.generate([t]))
        assert t.finished and not t.env_done and not t.ended_naturally
        assert (t.score, program.stopped) == (score, stopped)


def test_an_episode_that_fails_before_its_first_turn_ends_without_tokens():
    class Dead(Tool):
        opens = True

        async def respond(self, prompt, turns, episode):
            return Ended(Score(None, error="the program ended"))

    t, other = new_trajectory(id=3), new_trajectory(id=4, dialogue=False)
    asyncio.run(window(plan_of(Dead(), step_wait_s=0.0), [t, other], step=2))
    assert t.finished and t.num_response_tokens == 0 and t.segments[-1].step == 2 and t.score.error == "the program ended"


def test_a_dialogue_that_ends_without_a_new_token_ends_in_the_step_of_the_reply():
    async def main():
        tool = Tool(num_turns=1, ready=False)
        plan = plan_of(tool, step_wait_s=0.05)
        t = new_trajectory(id=1, budget=60, max_turn_tokens=4)
        await window(plan, [t])
        tool.events["train-1"].set()
        await asyncio.sleep(0)
        await window(plan, [t, new_trajectory(id=2, dialogue=False)], step=1)
        assert t.finished and t.segments[-1].step == 1 and t.window_tokens(1) == 0 and t.num_generated_tokens == 4

    asyncio.run(main())


def make_pool(num_slots=1):
    sampler = PromptSampler([Prompt("p", (1, 2))], seed=0)
    start = lambda prompt, id, group_id, sample_index: Trajectory(id, prompt, group_id, sample_index, 40, dialogue=True, max_turn_tokens=4)  # noqa: E731
    return SlotPool(sampler, start, num_slots=num_slots, num_samples_per_prompt=1)


def test_a_further_row_trains_its_own_tokens_alone_and_takes_no_slot():
    class Forks(Tool):
        """Opens a row whose prompt is the first row's first turn, and ends both rows together."""

        async def respond(self, prompt, turns, episode):
            if self.branches is None:
                raise AssertionError
            if episode == "train-0":
                opened = asyncio.get_running_loop().create_future()
                shared = (*prompt.token_ids, *turns[0].token_ids)
                self.branches.put_nowait(Branch(episode, Message(token_ids=shared), opened))
                self.row = await opened
                await self.events.setdefault("row", asyncio.Event()).wait()
            else:
                self.events.setdefault("row", asyncio.Event()).set()
            return Ended(Score(1.0))

    async def main():
        environment, pool = Forks(), make_pool()
        environment.branches = asyncio.Queue()
        slots = pool.fill(0)

        def open_row(first, token_ids):
            slots.append(pool.open_row(first, token_ids))
            return slots[-1]

        await window(plan_of(environment), slots, open_row=open_row)
        first, row = slots
        assert environment.row == f"train-{row.id}" and row.parent == first.id and row.group_id == first.group_id
        assert row.prompt.token_ids == (*first.prompt.token_ids, *first.response_ids.tolist())
        assert row.num_generated_tokens > 0 and first.finished and row.finished
        assert len(row.prompt.token_ids) + row.max_response_tokens == len(first.prompt.token_ids) + first.max_response_tokens
        # The next step has one slot's episode, whatever the number of rows, and both rows leave together.
        assert [t.parent for t in pool.fill(1)] == [-1]
        assert {t.id for t in pool.release_finished(0)} == {first.id, row.id}

    asyncio.run(main())


def test_a_row_waits_for_the_window_of_its_episode_and_ends_with_it():
    async def main():
        loop = asyncio.get_running_loop()
        tool = Tool()
        tool.branches = asyncio.Queue()
        foreign, stale, own = (Branch(name, Message(token_ids=(1,)), loop.create_future()) for name in ("eval-0-1", "train-1", "train-1"))
        stale.opened.cancel()
        for branch in (foreign, stale, own):
            tool.branches.put_nowait(branch)
        found = EnvironmentCalls(tool).branches({"train-1"})
        assert await asyncio.wait_for(anext(found), 5) is own
        assert tool.branches.get_nowait() is foreign and tool.branches.empty()

    asyncio.run(main())


def test_a_failing_environment_that_waits_is_reported_with_its_prompt():
    class Broken(Tool):
        async def respond(self, prompt, turns, episode):
            raise RuntimeError("no tool")

    with pytest.raises(EnvironmentFault, match="Broken failed at file:1: RuntimeError: no tool"):
        asyncio.run(window(plan_of(Broken()), [new_trajectory(max_turn_tokens=4)]))


def test_an_evaluation_waits_for_every_dialogue():
    async def main():
        tool = Tool(num_turns=1, ready=False)
        t = new_trajectory(id=1, budget=60, max_turn_tokens=4)
        running = asyncio.create_task(window(plan_of(tool, step_wait_s=0.0), [t], kind="eval"))
        await asyncio.sleep(0.2)
        assert not running.done()
        tool.events["eval-0-1"].set()
        await running
        assert t.finished

    asyncio.run(main())


def test_a_cancelled_evaluation_leaves_no_call_behind():
    async def main():
        tool = Tool(ready=False)
        plan = plan_of(tool)
        running = asyncio.create_task(window(plan, [new_trajectory(id=1, budget=60, max_turn_tokens=4)], kind="eval"))
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert tool.asked == [("eval-0-1", 1)] and tool.stopped == ["eval-0-1"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_two_thousand_waiting_dialogues_leave_the_loop_free():
    async def main():
        tool = Tool(num_turns=2, ready=False)
        plan = plan_of(tool, step_wait_s=1.0)
        trajectories = [new_trajectory(id=i, budget=60, max_turn_tokens=2) for i in range(2000)]
        running = asyncio.create_task(window(plan, trajectories))
        while len(tool.events) < 2000:
            await asyncio.sleep(0.01)
        # CPU seconds of this process between two turns of the loop, because other processes share a test machine's cores.
        lags, before_s = [], time.process_time()
        for _ in range(100):
            await asyncio.sleep(0.005)
            lags.append(time.process_time() - before_s)
            before_s = time.process_time()
        await running
        assert sorted(lags)[90] < 0.02

    asyncio.run(main())


class Limits(Talk):
    """Answers with limits of the next turn, one after the other."""

    def __init__(self, *limits):
        super().__init__(num_turns=len(limits) + 1, stop_strings=())
        self.limits = limits

    def respond(self, prompt, turns):
        message = super().respond(prompt, turns)
        return message and replace(message, **self.limits[len(turns) - 1])


@pytest.mark.parametrize("num_tokens", [100, 3])
def test_a_message_limits_the_next_turn_alone_in_one_window_or_in_many(num_tokens):
    async def main():
        t = new_trajectory(budget=90, max_turn_tokens=8)
        plan = plan_of(Limits({"max_turn_tokens": 5}, {"max_turn_tokens": 500}, {}))
        for step in range(12):
            t = Trajectory.from_dict(t.to_dict())
            await window(plan, [t], step=step, num_tokens=num_tokens, end_weight=0.0)
        assert [turn.num_tokens for turn in t.turns()] == [8, 5, 8, 8] and t.env_done

    asyncio.run(main())


@pytest.mark.parametrize("num_tokens", [100, 3])
def test_a_stop_string_of_a_message_ends_the_next_turn_alone_and_stays_in_it(num_tokens):
    async def main():
        free = new_trajectory(budget=200, max_turn_tokens=40)
        await window(plan_of(Limits({}, {})), [free], end_weight=0.0)
        turn = free.turns()[1]
        stop = decode(turn.token_ids[5:7].tolist())
        assert turn.num_tokens > 8 and stop
        t = new_trajectory(budget=200, max_turn_tokens=40)
        for step in range(60):
            t = Trajectory.from_dict(t.to_dict())
            await window(plan_of(Limits({"stop_strings": (stop,)}, {})), [t], step=step, num_tokens=num_tokens, end_weight=0.0)
        first, second, third = t.turns()
        assert first.token_ids.tolist() == free.turns()[0].token_ids.tolist() and third.num_tokens > 8
        assert decode(second.token_ids.tolist()).endswith(stop) and second.finish_reason == "stop"
        assert second.token_ids.tolist() == turn.token_ids[: second.num_tokens].tolist() and second.num_tokens <= 7

    asyncio.run(main())


def test_a_turn_that_nobody_waits_for_is_aborted_and_ends_with_its_tokens():
    class Leaves(Tool):
        async def respond(self, prompt, turns, episode):
            self.unwanted.discard(episode)
            engine.hold.clear()
            return await super().respond(prompt, turns, episode)

    async def main():
        tool, t = Leaves(num_turns=2), new_trajectory(id=1, budget=60)
        tool.unwanted = {"train-1"}
        made = WindowGenerator(engine, None, plan_of(tool), step=0, num_tokens=100, weight_version=1, kind="train")
        await asyncio.wait_for(made.generate([t]), 20)
        first, second = t.turns()
        assert first.finish_reason == "abort" and first.num_tokens == 30 and second.num_tokens == 28 and t.finished

    engine = Engine(hold={1}, end_weight=0.0)
    asyncio.run(main())


def test_an_environment_that_does_not_start_ends_the_run_with_its_key_and_a_remedy():
    async def hang():
        await asyncio.Event().wait()

    async def fail():
        raise TimeoutError  # has no text

    for start, words in ((hang, "did not start within 0.05 s.*call_timeout_s"), (fail, "failed at its start: TimeoutError")):
        with background_loop() as event_loop, pytest.raises(EnvironmentFault, match=f"environment.name: shop:Shop {words}"):
            wait_until_started(asyncio.run_coroutine_threadsafe(start(), event_loop), "shop:Shop", 0.05 if start is hang else 5)
