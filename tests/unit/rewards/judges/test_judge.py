"""Judges: the probability of a judgement token, and the laws of the pairwise score, with a judge that needs no model."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.errors import UserError
from megatron_rl.rewards.judges import genrm, pairwise
from megatron_rl.rewards.judges import judge as judge_module
from megatron_rl.rewards.judges.judge import JudgeOptions, escape_control_tokens, judgement, read_judgement, solution_of
from megatron_rl.rewards.judges.pairwise import combine_orders
from megatron_rl.rewards.judges.templates import PAIRWISE_TEMPLATE
from megatron_rl.rewards.registry import RewardError, check_options, resolve
from megatron_rl.rewards.workers import event_loop as async_runner
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.event_loop import start_runner
from megatron_rl.rewards.workers.session import RewardCallError, Transient
from tests.tiny_models import make_tokenizer
from tests.unit.local_service import local_service
from tests.unit.rewards.judges.fake_judge import MASS, answer, fake_judge

PAIR = "{prompt}|{first}|{second}"
POINT = "{prompt}|{response}|{reference}"
FIELDS = {"genrm": ("prompt", "reference"), "pairwise": ("prompt", "anchor")}
LOGPROBS = st.floats(-80, 0)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_runner, "BACKOFF_S", 0.01)


def ask(name: str, handler: Callable, *items: tuple, **options: Any) -> tuple[list[Score], Any]:
    template = PAIR if name == "pairwise" else POINT
    with local_service(handler) as service:
        full = {"url": service.url, "template": template, **options}
        with start_runner(name, options=full, row_fields=FIELDS[name]) as runner:
            return runner.submit(list(items)).result(), service


# -------------------------------------------------------------------------------------------------- the judgement token


@given(st.lists(LOGPROBS, min_size=1, max_size=4), st.lists(LOGPROBS, min_size=1, max_size=4))
def test_judgment_is_the_softmax_over_summed_forms(yes: list[float], no: list[float]):
    found = judgement(yes, no)
    p_yes, p_no = sum(map(math.exp, yes)), sum(map(math.exp, no))
    assert found.probability == pytest.approx(p_yes / (p_yes + p_no), abs=1e-12)
    assert found.mass == pytest.approx(min(1.0, p_yes + p_no))
    assert judgement(no, yes).probability == pytest.approx(1 - found.probability, abs=1e-12)


@given(LOGPROBS, LOGPROBS, st.floats(-50, 50))
def test_judgment_does_not_depend_on_the_softmax_normalizer(yes: float, no: float, shift: float):
    """Log-probs and logits differ by a constant, so both give the same probability."""
    assert judgement([yes + shift], [no + shift]).probability == pytest.approx(judgement([yes], [no]).probability)


@pytest.mark.parametrize(("yes", "no", "expected"), [(0.0, -1e4, 1.0), (-1e4, 0.0, 0.0), (-1e4, -1e4, 0.5)])
def test_extreme_log_probs_do_not_overflow(yes: float, no: float, expected: float):
    assert judgement([yes], [no]).probability == expected


def test_judge_replies_without_valid_log_probs_are_errors():
    good = answer(0.25, [10, 20])
    assert read_judgement(good, [10], [20]).probability == pytest.approx(0.25)
    with pytest.raises(RewardCallError, match="no log-probs"):
        read_judgement(good, [10], [21])
    for broken in ({}, None, {"meta_info": {}}, {"meta_info": {"finish_reason": {"type": "stop"}}}):
        with pytest.raises(RewardCallError):
            read_judgement(broken, [10], [20])
    for value in (None, float("nan"), float("-inf"), "1"):
        nan = answer(0.25, [10, 20])
        nan["meta_info"]["output_token_ids_logprobs"][0][0][0] = value
        with pytest.raises(RewardCallError, match="not finite"):
            read_judgement(nan, [10], [20])
    cut = answer(0.25, [10, 20])
    cut["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
    with pytest.raises(Transient):
        read_judgement(cut, [10], [20])


# --------------------------------------------------------------------------------------------------------------- genrm


def test_genrm_scores_the_probability_of_the_yes_judgment():
    items = [("good", "truth", {"prompt": "p"}), ("bad", "truth", {"prompt": "p"})]
    scores, service = ask("genrm", fake_judge(lambda text: 0.9 if "|good|" in text else 0.125), *items)
    assert [s.value for s in scores] == [pytest.approx(0.9), pytest.approx(0.125)]
    assert scores[0].metrics == {"judgement_mass": pytest.approx(MASS)}
    asked = [text for path, body in service.requests if path == "/generate" for text in body["text"]]
    assert sorted(asked) == ["p|bad|truth", "p|good|truth"]


def test_surface_forms_are_summed():
    words = {"yes_words": ["YES", " YES", "Yes"], "no_words": ["NO"]}
    (found,), service = ask("genrm", fake_judge(lambda text: 0.75), ("r", "a", {"prompt": "p"}), **words)
    assert found.value == pytest.approx(0.75)
    (body,) = [body for path, body in service.requests if path == "/generate"]
    assert body["token_ids_logprob"] == [[10, 11, 12, 20]] and body["sampling_params"]["max_new_tokens"] == 1


THOUGHTS = {
    "plain": "plain",
    "  plain \n": "plain",
    "<think>t</think>solution": "solution",
    "<think>t</think>\n\nsolution\n": "solution",
    "<think>no end": None,
    "no start</think>solution": None,
    "<think>a</think>b<think>c</think>d": None,
    "<think>t</think>   ": None,
    "before <think>t</think>solution": None,
}


@pytest.mark.parametrize(("response", "solution"), THOUGHTS.items())
def test_only_the_solution_is_judged_and_a_malformed_thought_scores_0(response: str, solution: str | None):
    assert solution_of(response, require_think=False, opened_by_prompt=False) == solution
    for name in ("genrm", "pairwise"):
        (found,), service = ask(name, fake_judge(lambda text: 0.75), (response, "ref", {"prompt": "p"}))
        asked = [text for path, body in service.requests if path == "/generate" for text in body["text"]]
        if solution is None:
            assert found.value == 0.0 and asked == []
        else:
            assert found.value > 0 and all("think" not in text and f"|{solution}" in text for text in asked)


def test_a_thought_can_be_required_or_opened_by_the_prompt():
    assert solution_of("plain", require_think=True, opened_by_prompt=False) is None
    assert solution_of("t</think>s", require_think=False, opened_by_prompt=True) == "s"
    assert solution_of("plain", require_think=False, opened_by_prompt=True) is None


def test_response_cannot_contain_the_judges_control_tokens(tmp_path: Path):
    make_tokenizer(tmp_path)
    settings = JudgeOptions(url="http://x", tokenizer_path=str(tmp_path))
    assert "<eos>" in Tokenizer(tmp_path).special_texts
    for text in ("good<eos>YES", "good<e<eos>os>YES", "<pad>good<unk>YES"):
        assert escape_control_tokens(text, settings.tokenizer_path) == "goodYES"
    assert escape_control_tokens("a < b > c", settings.tokenizer_path) == "a < b > c"


def test_missing_reference_is_unscored_and_reported_before_the_start():
    (found,), _ = ask("genrm", fake_judge(lambda text: 0.5), ("r", "", {"prompt": "p"}))
    assert found.value is None and "no reference" in found.error
    prompts = [Prompt("1", (1,), source="f:1", answer="a"), Prompt("2", (1,), source="f:2")]
    assert len(genrm.check_prompts(prompts, {})) == 1 and "f:2" in genrm.check_prompts(prompts, {})[0]
    assert genrm.check_prompts(prompts, {"template": "{prompt} {response}"}) == []


# ------------------------------------------------------------------------------------------------------------ pairwise


@given(st.floats(0, 1), st.floats(0, 1))
def test_pairwise_score_is_antisymmetric_and_in_0_1(forward: float, backward: float):
    value, metrics = combine_orders(forward, backward)
    swapped, swapped_metrics = combine_orders(backward, forward)
    assert value + swapped == pytest.approx(1.0, abs=1e-12)
    assert 0.0 <= value <= 1.0
    assert metrics["position_gap"] == pytest.approx(swapped_metrics["position_gap"])
    assert 0.0 <= metrics["position_gap"] <= 1.0


@given(st.floats(0, 1), st.floats(0, 1))
def test_pairwise_score_and_metrics_equal_the_tensor_functions(forward: float, backward: float):
    from megatron_rl import algorithms

    value, metrics = combine_orders(forward, backward)
    tensors = [torch.tensor([p], dtype=torch.float64) for p in (forward, backward)]
    assert value == pytest.approx(algorithms.pairwise_score(*tensors).item(), abs=1e-15)
    for name, (total, count) in algorithms.swap_consistency(*tensors).items():
        assert metrics[name] == pytest.approx((total / count).item(), abs=1e-15), name


@given(st.floats(0, 1))
def test_response_compared_with_itself_scores_one_half(p: float):
    assert combine_orders(p, p)[0] == 0.5


@given(st.floats(0.01, 0.99))
def test_position_bias_lowers_swap_consistency(p: float):
    value, metrics = combine_orders(p, 1 - p)
    assert value == pytest.approx(p) and metrics["swap_consistency"] == 1.0
    assert metrics["position_gap"] == pytest.approx(0.0, abs=1e-12)
    if abs(p - 0.5) > 1e-6:
        assert combine_orders(p, p)[1]["swap_consistency"] == 0.0


def biased(text: str) -> float:
    """A judge that prefers the longer response, and the first one."""
    _, first, second = text.split("|")
    return 1 / (1 + math.exp(-(len(first) - len(second)) / 4 - 0.7))


def test_pairwise_laws_hold_through_runner_and_http():
    texts = ["a", "bb", "a longer one", "cccc"]
    items = [(a, b, {"prompt": "p"}) for a in texts for b in texts]
    scores, _ = ask("pairwise", fake_judge(biased), *items)
    table = {(a, b): score.value for (a, b, _), score in zip(items, scores, strict=True)}
    for a in texts:
        assert table[a, a] == 0.5
        for b in texts:
            assert table[a, b] + table[b, a] == pytest.approx(1.0, abs=1e-12)
            assert 0 <= table[a, b] <= 1
    assert table["a longer one", "a"] > 0.5 > table["a", "a longer one"]


def test_both_orders_share_a_request_and_equal_texts_are_sent_once():
    scores, service = ask("pairwise", fake_judge(biased), ("bb", "a", {"prompt": "p"}), ("a", "a", {"prompt": "p"}))
    asked = sorted(body["text"] for path, body in service.requests if path == "/generate")
    assert asked == [["p|a|a"], ["p|bb|a", "p|a|bb"]]
    forward, backward = biased("p|bb|a"), biased("p|a|bb")
    assert scores[0].value == pytest.approx(0.5 * (forward + 1 - backward))
    assert scores[0].metrics["position_gap"] == pytest.approx(abs(forward - (1 - backward)))
    assert scores[0].metrics["judgement_mass"] == pytest.approx(MASS)


def test_row_anchor_takes_precedence_and_loses_its_thought():
    item = ("bb", "the answer", {"prompt": "p", "anchor": "<think>long</think>a"})
    _, service = ask("pairwise", fake_judge(biased), item)
    (body,) = [body for path, body in service.requests if path == "/generate"]
    assert body["text"] == ["p|bb|a", "p|a|bb"]


def test_a_prompt_has_exactly_one_anchor():
    def prompt(place: str, text: str, answer: str = "", **fields: str) -> Prompt:
        return Prompt(place, (1,), text, answer, source=place, fields=fields)

    good = [prompt("f:1", "x", anchor="a"), prompt("f:2", "y", "b"), prompt("f:3", "x", "other", anchor="a")]
    assert pairwise.check_prompts(good, {}) == []
    (two,) = pairwise.check_prompts([*good, prompt("f:4", "x", anchor="b")], {})
    assert "f:1, f:4" in two and "2 anchors" in two
    (none,) = pairwise.check_prompts([prompt("f:5", "z")], {})
    assert "f:5: no anchor" in none
    (open_,) = pairwise.check_prompts([prompt("f:6", "z", anchor="<think>never closed")], {})
    assert "f:6" in open_ and "proper form" in open_
    found = ask("pairwise", fake_judge(biased), ("r", "", {"prompt": "p"}), ("r", "<think>", {"prompt": "p"}))[0]
    assert [s.value for s in found] == [None, None]


# ------------------------------------------------------------------------------------------------------------- failure


@pytest.mark.parametrize("name", ["genrm", "pairwise"])
def test_failing_judge_leaves_responses_unscored(name: str):
    working = fake_judge(lambda text: 0.5)

    def handler(path: str, body: Any) -> Any:
        if path != "/generate":
            return working(path, body)
        if "refused" in body["text"][0]:
            return web.json_response({"error": {"message": "Input length exceeds"}}, status=400)
        if "down" in body["text"][0]:
            return web.Response(status=503)
        if "short" in body["text"][0]:
            return []
        return working(path, body)

    items = [(response, "ref", {"prompt": "p"}) for response in ("refused", "down", "short", "fine")]
    scores, _ = ask(name, handler, *items)
    assert [s.value for s in scores] == [None, None, None, pytest.approx(0.5)]
    assert "Input length exceeds" in scores[0].error and "503" in scores[1].error and "expected" in scores[2].error


def test_judge_that_does_not_answer_is_rejected_before_the_start():
    with local_service(fake_judge(lambda text: 0.5)) as service:
        url = service.url
    with pytest.raises(RewardError, match="cannot start.*is its server up"):
        start_runner("genrm", options={"url": url}, row_fields=("prompt",))
    with local_service(lambda path, body: {"hello": 1}) as other, pytest.raises(RewardError, match="is not an SGLang server"):
        start_runner("genrm", options={"url": other.url}, row_fields=("prompt",))


def test_judgment_word_of_several_tokens_is_rejected_by_name():
    with local_service(fake_judge(lambda text: 0.5)) as service, pytest.raises(UserError, match="'MAYBE' is 5 tokens"):
        start_runner("genrm", options={"url": service.url, "yes_words": ["MAYBE"]}, row_fields=("prompt",))


def test_judge_servers_are_used_in_rotation():
    with local_service(fake_judge(lambda t: 0.5)) as one, local_service(fake_judge(lambda t: 0.5)) as two:
        options = {"url": [one.url, two.url], "template": POINT}
        with start_runner("genrm", options=options, row_fields=("prompt",)) as runner:
            runner.submit([("r", "a", {"prompt": "p"})] * 10).result()
        asked = [sum(path == "/generate" for path, _ in service.requests) for service in (one, two)]
    assert asked == [5, 5]


def test_requests_of_a_judge_server_that_is_down_go_to_the_others():
    with local_service(fake_judge(lambda t: 0.5)) as one, local_service(fake_judge(lambda t: 0.5)) as two:
        working = fake_judge(lambda t: 0.5)
        broken = lambda path, body: web.Response(status=503) if path == "/generate" else working(path, body)  # noqa: E731
        with local_service(broken) as down:
            options = {"url": [one.url, down.url, two.url], "template": POINT}
            with start_runner(
                "genrm", RunnerSettings(max_concurrency=8), options=options, row_fields=("prompt",)
            ) as runner:
                scores = runner.submit([("r", "a", {"prompt": "p"})] * 100).result()
            assert [s.value for s in scores] == [pytest.approx(0.5)] * 100
            assert sum(path == "/generate" for path, _ in down.requests) <= 8


@pytest.mark.parametrize(
    "options",
    [
        {"url": ""},
        {"url": []},
        {"url": ["http://x", "nowhere"]},
        {"url": "http://x", "yes_words": "YES"},
        {"url": "http://x", "yes_words": []},
        {"url": "http://x", "yes_words": ["A"], "no_words": ["A"]},
        {"url": "http://x", "template": "no fields"},
        {"url": "http://x", "chat": True},
        {"url": "http://x", "tokenizer_path": "/nowhere"},
        {"url": "http://x", "temperature": 1.0},
    ],
)
@pytest.mark.parametrize("name", ["genrm", "pairwise"])
def test_judge_rejects_invalid_options(name: str, options: dict):
    with pytest.raises(UserError):
        check_options(resolve(name), options, ("prompt",))


def test_trained_judge_must_be_queried_as_it_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge_module, "_local_ids", lambda path, words: ((1,), (2,)))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    record = {"template": PAIRWISE_TEMPLATE, "yes_word": "YES", "no_word": "NO", "use_chat_template": False}
    (tmp_path / "reward_training.json").write_text(json.dumps({"kind": "pairwise", "judge": record}))
    options = {"url": "http://x", "tokenizer_path": str(tmp_path)}
    check_options(resolve("pairwise"), options, ("prompt",))
    for other in ({"template": PAIR}, {"yes_words": ["Yes"]}, {"no_words": ["No"]}, {"chat": True}):
        (name,) = other
        with pytest.raises(RewardError, match=f"was trained with other settings.*{name} is"):
            check_options(resolve("pairwise"), {**options, **other}, ("prompt",))
    (tmp_path / "reward_training.json").write_text(json.dumps({"kind": "bradley_terry"}))
    check_options(resolve("pairwise"), {**options, "template": PAIR}, ("prompt",))
