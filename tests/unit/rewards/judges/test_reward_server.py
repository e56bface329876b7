"""Reward ``http`` against a local service: requests, accepted replies, and failures, which are never a score of 0."""

from typing import Any

import pytest
from aiohttp import web

from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.rewards.judges.reward_server import check_prompts, read_verdict
from megatron_rl.rewards.registry import RewardError, check_options, resolve
from megatron_rl.rewards.workers import event_loop as async_runner
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.event_loop import start_runner
from tests.unit.local_service import Handler, Sleep, local_service


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_runner, "BACKOFF_S", 0.01)


def score(handler: Handler, *items: tuple, timeout_s: float = 2.0, **options: Any) -> tuple[list[Score], Any]:
    with local_service(handler) as service:
        full = {"url": f"{service.url}/grade", **options}
        with start_runner("http", RunnerSettings(timeout_s=timeout_s), options=full, row_fields=("row",)) as runner:
            return runner.submit(list(items)).result(), service


def length_share(path: str, body: Any) -> Any:
    if isinstance(body, list):
        return [length_share(path, each) for each in body]
    return {"score": len(body["response"]) / 10, "detail": body["answer"]}


def test_http_reward_sends_response_answer_and_row_and_returns_the_score():
    scores, service = score(length_share, ("four", "a", {"row": {"prompt": "p", "level": 3}}), ("", "b"))
    assert scores == [Score(0.4, "a"), Score(0.0, "b")]
    assert ("/grade", {"prompt": "p", "level": 3, "response": "four", "answer": "a"}) in service.requests


def test_http_reward_sends_only_the_listed_fields():
    row = {"prompt": "p", "level": 3, "secret": "s"}
    scores, service = score(length_share, ("r", "a", {"row": row}), ("r", "a", {"row": {}}), fields=["level"])
    assert service.requests == [("/grade", {"level": 3, "response": "r", "answer": "a"})]
    assert scores[1].value is None and "level" in scores[1].error
    prompts = [Prompt("1", (1,), source="f:1", fields={"level": 1}), Prompt("2", (1,), source="f:2")]
    assert check_prompts(prompts, {"fields": ["level", "prompt"]}) == ["f:2: field 'level' is missing"]


@pytest.mark.parametrize(
    ("verdict", "error"),
    [
        ({"score": float("nan")}, "finite"),
        ({"score": float("inf")}, "finite"),
        ({"score": 1.5}, "outside [0, 1]"),
        ({"score": -0.1}, "outside [0, 1]"),
        ({"score": "1.0"}, "finite number"),
        ({"score": [1]}, "finite number"),
        ({"score": None, "error": "no idea"}, "no idea"),
        ({"score": None}, "gave no score"),
        ({"points": 1}, "expected"),
        ([0.5], "expected"),
        (0.5, "expected"),
        (None, "expected"),
    ],
)
def test_invalid_service_reply_is_unscored(verdict: Any, error: str):
    found = read_verdict(verdict, 0.0, 1.0)
    assert found.value is None and error in found.error


def test_service_score_may_be_any_number_in_the_range():
    assert [read_verdict({"score": s}, -1, 1).value for s in (True, False, 1, -1, 0.25)] == [1.0, 0.0, 1.0, -1.0, 0.25]


@pytest.mark.parametrize(
    ("response", "error", "num_requests"),
    [
        (lambda: web.Response(status=500, text="broken"), "answered 500: broken", 2),
        (lambda: web.Response(status=429, text="slowly"), "answered 429", 2),
        (lambda: web.Response(status=404, text="no such path"), "answered 404", 1),
        (lambda: web.Response(status=302, headers={"Location": "/grade"}), "answered 302", 1),
        (lambda: web.Response(text="<html>"), "expected JSON", 1),
        (lambda: web.Response(text="[" * 100_000), "expected JSON", 1),
    ],
)
def test_failing_service_is_retried_only_for_transient_errors(
    response, error: str, num_requests: int
):
    (found,), service = score(lambda path, body: response(), ("r", "a"))
    assert found.value is None and error in found.error
    assert len(service.requests) == num_requests


def test_service_that_recovers_loses_no_item():
    num_asked = 0

    def handler(path: str, body: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return web.Response(status=503) if num_asked == 1 else {"score": 1.0}

    assert score(handler, ("r", "a"))[0] == [Score(1.0)]


def test_slow_reply_times_out_without_delaying_other_items():
    def handler(path: str, body: Any) -> Any:
        return Sleep(30) if body["response"] == "slow" else {"score": 1.0}

    scores, _ = score(handler, ("slow", ""), *[("fast", "")] * 20, timeout_s=0.5)
    assert scores[0] == Score(None, error="timed out after 0.5 s")
    assert scores[1:] == [Score(1.0)] * 20


def test_unreachable_service_leaves_items_unscored():
    with local_service(length_share) as service:
        url = service.url
    with start_runner("http", RunnerSettings(timeout_s=2.0), options={"url": url}) as runner:
        (found,) = runner.submit([("r", "a")]).result()
    assert found.value is None and "no answer" in found.error


def test_endless_service_reply_is_rejected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_rl.rewards.workers.session._MAX_ANSWER_BYTES", 1 << 16)
    (found,), _ = score(lambda path, body: web.Response(text="x" * (1 << 20)), ("r", "a"))
    assert found.value is None and "longer than" in found.error


# ------------------------------------------------------------------------------------------------------------- batches


def test_batches_hold_at_most_batch_size_items_and_keep_the_order():
    items = [("x" * (n % 10), str(n)) for n in range(50)]
    scores, service = score(length_share, *items, batch_size=8)
    assert [(s.value, s.detail) for s in scores] == [((n % 10) / 10, str(n)) for n in range(50)]
    sizes = [len(body) for _, body in service.requests]
    assert sum(sizes) == 50 and max(sizes) <= 8 and len(sizes) <= 10


def test_invalid_item_does_not_fail_its_batch():
    def handler(path: str, body: Any) -> Any:
        return web.Response(status=400) if any(b["response"] == "bad" for b in body) else length_share(path, body)

    scores, _ = score(handler, ("one", ""), ("bad", ""), ("four", ""), batch_size=4)
    assert [s.value for s in scores] == [0.3, None, 0.4]


def test_batch_reply_of_the_wrong_length_leaves_items_unscored():
    scores, _ = score(lambda path, body: [{"score": 1.0}] * 3, ("a", ""), ("b", ""), batch_size=4)
    assert [s.value for s in scores] == [None, None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"url": "localhost:80"},
        {"url": "http://x", "low": 1.0},
        {"url": "http://x", "batch_size": 0},
        {"url": "http://x", "fields": "level"},
    ],
)
def test_http_reward_rejects_invalid_options(options: dict):
    with pytest.raises(RewardError):
        check_options(resolve("http"), options)


def test_http_reward_range_follows_the_options():
    assert resolve("http").value_range({"url": "http://x", "low": -1, "high": 2}) == (-1.0, 2.0)
