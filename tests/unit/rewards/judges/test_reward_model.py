"""Reward ``reward_model``: what servers may reply, and what is refused before a run starts."""

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rewards.registry import RewardError, check_options, resolve
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.event_loop import start_runner
from tests.tiny_models import make_tokenizer
from tests.unit.local_service import local_service


def served(reply: Any) -> Any:
    """A handler whose scores are ``reply(token ids)``, or that reply itself if it is no number."""

    def handler(path: str, body: Any) -> Any:
        if path == "/model_info":
            return {"model_path": "fake", "is_generation": False}
        assert path == "/classify"
        found = reply(body["input_ids"][0])
        return [{"embedding": [found], "meta_info": {}}] if isinstance(found, (int, float)) else found

    return handler


def options_of(folder: Path, **others: Any) -> dict[str, Any]:
    make_tokenizer(folder)
    return {"url": "http://127.0.0.1:1", "tokenizer_path": str(folder), **others}


def ask(options: dict[str, Any], *items: Any) -> list[Any]:
    with start_runner("reward_model", RunnerSettings(timeout_s=20.0), options=options, row_fields=("prompt",)) as runner:
        return runner.submit(list(items)).result()


def test_the_model_reads_prompt_response_and_the_end_of_the_text_without_control_tokens(tmp_path: Path):
    seen = []
    with local_service(served(lambda ids: seen.append(ids) or float(len(ids)))) as service:
        plain, spelled = ask(options_of(tmp_path, url=service.url), ("ab", "", {"prompt": "p"}), ("a<eos>b", "", {"prompt": "p"}))
    _, first, second = seen
    assert first == second and len(first) == 4 and plain.value == spelled.value == 4.0


@pytest.mark.parametrize(("value", "reward", "limited"), [(3.0, 2.0, 1.0), (-3.0, -1.0, 1.0), (0.5, 0.5, 0.0)])
def test_scores_are_limited(tmp_path: Path, value: float, reward: float, limited: float):
    with local_service(served(lambda ids: value)) as service:
        (score,) = ask(options_of(tmp_path, url=service.url, low=-1.0, high=2.0), ("r", "", {"prompt": "p"}))
    assert score.value == reward and score.metrics == {"limited": limited}


@pytest.mark.parametrize("value", [-499.0, -1.5, 0.0, 20.0])
def test_sigmoid_makes_a_share_of_it(tmp_path: Path, value: float):
    options = {"low": -500.0, "high": 500.0, "sigmoid": True}
    with local_service(served(lambda ids: value)) as service:
        (score,) = ask(options_of(tmp_path, url=service.url, **options), ("r", "", {"prompt": "p"}))
    assert score.value == pytest.approx(1 / (1 + math.exp(-value)), rel=1e-12) and 0 <= score.value <= 1
    assert resolve("reward_model").value_range(options) == (0.0, 1.0)


@pytest.mark.parametrize(
    "reply", [math.nan, [], [{"embedding": [1.0, 2.0]}], [{"embedding": ["1"]}], [{}], {"embedding": [1.0]}, [None], "text"]
)
def test_a_reply_without_one_finite_score_leaves_the_response_unscored(tmp_path: Path, reply: Any):
    make_tokenizer(tmp_path)
    with local_service(served(lambda ids: 1.0 if len(ids) > 9 else reply)) as service:
        (score,) = ask(options_of(tmp_path, url=service.url), ("r", "", {"prompt": "p"}))
    assert score.value is None and service.url in score.error


def test_servers_that_disagree_are_refused_before_the_start(tmp_path: Path):
    with local_service(served(lambda ids: 1.0)) as one, local_service(served(lambda ids: 1.2)) as two:
        with pytest.raises(RewardError, match=r"score one text differently.*score\.bias"):
            ask(options_of(tmp_path, url=[one.url, two.url]))
        assert ask(options_of(tmp_path, url=[one.url, one.url])) == []


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"url": ""}, "set option url"),
        ({"url": []}, "set option url"),
        ({"url": ["http://a", "b"]}, "set option url"),
        ({"tokenizer_path": ""}, "tokenizer_path: not set has no tokenizer_config.json"),
        ({"low": 1.0, "high": 1.0}, "low < high"),
        ({"high": math.inf}, "low < high"),
        ({"system_prompt": "be brief"}, "needs chat"),
        ({"chat": True}, "option chat.*no chat template"),
    ],
)
def test_wrong_options_are_refused_without_a_server(tmp_path: Path, wrong: dict[str, Any], text: str):
    with pytest.raises(RewardError, match=text):
        check_options(resolve("reward_model"), options_of(tmp_path) | wrong, ("prompt",))
