"""The runner of async rewards gives every item exactly one score, regardless of the reward's behavior."""

import asyncio
import concurrent.futures
import threading
import time

import pytest

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import RewardError, check_options, resolve
from megatron_rl.rewards.workers import event_loop as async_runner
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.event_loop import AsyncRewardRunner, start_runner
from megatron_rl.rewards.workers.processes import RewardRunner
from tests.unit.rewards import async_rewards

PATH = "tests.unit.rewards.async_rewards"


@pytest.fixture(autouse=True)
def fast_and_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_runner, "BACKOFF_S", 0.01)
    async_rewards.calls.clear()


def misbehaving(options: dict | None = None, **settings) -> AsyncRewardRunner:
    return AsyncRewardRunner(f"{PATH}:misbehave", RunnerSettings(**{"timeout_s": 0.3, **settings}), options=options)


ERRORS = {
    "sleep 5": "timed out after 0.3 s",
    "stubborn": "timed out after 0.3 s",
    "raise": "ValueError: the reward's own mistake",
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "cancel": "cancelled itself",
    "cancelled": "cancelled itself",
    "transient": "Transient: the server is busy (tries: 2)",
    "nan": "expected a finite number",
    "nothing": "TypeError",
}


def test_misbehaving_items_affect_only_their_own_score():
    items = [("good", "")] * 200
    for index, kind in enumerate(ERRORS):
        items.insert(index * 15, (kind, ""))
    with misbehaving() as runner:
        scores = runner.submit(items).result()
    for (response, _), score in zip(items, scores, strict=True):
        if response == "good":
            assert score == Score(4.0)
        else:
            assert score.value is None and ERRORS[response] in score.error, (response, score)


def test_scores_have_the_order_of_items_on_any_loop_and_thread():
    responses = ["x" * n for n in range(50)]
    items = [(response, "") for response in responses]

    async def from_loop(runner: AsyncRewardRunner) -> list[Score]:
        return await runner.score_many(items)

    with misbehaving() as runner:
        assert [s.value for s in asyncio.run(from_loop(runner))] == list(range(50))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for scores in pool.map(lambda _: runner.submit(items).result(), range(4)):
                assert [s.value for s in scores] == list(range(50))
        assert runner.submit([]).result() == []


def test_only_transient_errors_are_retried():
    with misbehaving() as runner:
        once, lasting, own = runner.submit([("once", ""), ("transient", ""), ("raise", "")]).result()
    assert (once.value, lasting.value, own.value) == (4.0, None, None)
    assert async_rewards.calls == {"once": 2, "transient": 2, "raise": 1}


@pytest.mark.parametrize("max_retries", [0, 3])
def test_number_of_retries_is_bounded(max_retries: int):
    with misbehaving(max_retries=max_retries, timeout_s=5.0) as runner:
        (score,) = runner.submit([("transient", "")]).result()
    assert score.value is None and async_rewards.calls["transient"] == max_retries + 1


def test_retries_and_pauses_end_by_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_runner, "BACKOFF_S", 0.1)
    started_at = time.monotonic()
    with misbehaving(max_retries=100, timeout_s=0.5) as runner:
        (score,) = runner.submit([("transient", "")]).result()
    assert score.value is None and time.monotonic() - started_at < 8.0  # a hundred pauses would be ten seconds
    assert 1 < async_rewards.calls["transient"] < 10


def test_at_most_max_concurrency_items_are_in_progress():
    with AsyncRewardRunner(f"{PATH}:crowd", RunnerSettings(max_concurrency=7)) as runner:
        scores = runner.submit([("", "")] * 60).result()
    assert [s.value for s in scores] == [1.0] * 60
    assert async_rewards.most_in_progress == 7


def test_reward_gets_its_options_and_returns_metrics_and_details():
    with misbehaving(options={"scale": 2.0}) as runner:
        plain, detailed = runner.submit([("four", ""), ("detail", "")]).result()
    assert plain == Score(8.0)
    assert detailed == Score(0.5, "half", metrics={"mass": 0.25})


def test_close_ends_calls_in_progress_and_rejects_new_calls():
    runner = misbehaving(timeout_s=60.0)
    waiting = runner.submit([("sleep 50", ""), ("good", "")])
    time.sleep(0.05)
    runner.close()
    with pytest.raises(RewardError, match="is closed"):
        waiting.result(timeout=1)
    with pytest.raises(RewardError, match="is closed"):
        runner.submit([("good", "")])
    runner.close()
    assert not [t for t in threading.enumerate() if t.name == f"reward-{PATH}:misbehave"]


def test_cancelled_call_drops_its_waiting_items():
    with misbehaving(timeout_s=5.0, max_concurrency=1) as runner:
        first = runner.submit([("sleep 0.2", ""), *[(f"dropped {i}", "") for i in range(50)]])
        time.sleep(0.05)
        assert first.cancel()
        assert runner.submit([("good", "")]).result()[0].value == 4.0
    assert not [response for response in async_rewards.calls if response.startswith("dropped")]


def test_reward_that_blocks_its_event_loop_fails_its_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_runner, "BLOCKED_GRACE_S", 1.0)
    monkeypatch.setattr(async_runner, "CLOSE_TIMEOUT_S", 0.1)
    with misbehaving() as runner, pytest.raises(RewardError, match="has blocked its event loop"):
        runner.submit([("block 6", ""), ("good", "")]).result(timeout=5.5)


def test_start_runner_chooses_the_runner_of_the_reward():
    with start_runner(f"{PATH}:exact") as runner:
        assert isinstance(runner, AsyncRewardRunner)
        assert [s.value for s in runner.submit([("a", "a"), ("a", "b")]).result()] == [1.0, 0.0]
    with pytest.raises(RewardError, match="is async"):
        RewardRunner(f"{PATH}:exact")
    with pytest.raises(RewardError, match="plain function"):
        AsyncRewardRunner("math")


@pytest.mark.parametrize(
    "settings", [{"max_concurrency": 0}, {"timeout_s": 0.0}, {"max_retries": -1}, {"options": {"scala": 1.0}}]
)
def test_runner_rejects_invalid_settings_at_its_start(settings: dict):
    with pytest.raises(RewardError):
        misbehaving(**settings)


def test_format_reward_rejects_an_async_inner_reward():
    with pytest.raises(RewardError, match="require_think"):
        check_options(resolve("format"), {"then": f"{PATH}:exact"})


def test_items_that_are_not_text_are_rejected():
    with misbehaving() as runner, pytest.raises(RewardError, match="item 1"):
        runner.submit([("a", "b"), ("a", 3)])
