"""Judges served by a real SGLang server: probabilities equal to the model's logits, and the pairwise laws."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import RewardConfig, RewardRouteConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.judges.templates import JUDGE_TEMPLATE, TemplateError, render_judge, render_pairwise
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rewards.router import ScoreItem, build_rewards
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.event_loop import start_runner
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.integration.preloaded import preloading, serving
from tests.tiny_models import make_tiny_model

START_TIMEOUT_S = 400.0
PROBABILITY_TOLERANCE = 1e-5
WORDS = {"yes_words": ["Y", "y"], "no_words": ["N"]}
"""The tiny tokenizer has a token for every character."""
PLAIN_TEMPLATE = "prompt {prompt} reference {reference} response {response} right?\n"
"""Only characters that the tokenizer knows: SGLang's own way of loading it drops the others, where ours keeps <unk>."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("judge"), seed=3)


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    with serving(SglangServer(ServerOptions(str(model_path), tokenizer=True), log, start_timeout_s=START_TIMEOUT_S)) as server:
        yield server


@pytest.fixture(scope="module")
def probability(model_path):
    """P(yes) after a text, from the model's logits in float64."""
    declare_torchvision_ops()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    tokenizer = Tokenizer(model_path)

    @torch.no_grad()
    def of(text: str) -> float:
        logits = model(torch.tensor([tokenizer.encode_prompt(text, chat=False)])).logits[0, -1].double()
        yes, no = ([tokenizer.encode(word)[0] for word in WORDS[key]] for key in ("yes_words", "no_words"))
        return torch.sigmoid(torch.logsumexp(logits[yes], 0) - torch.logsumexp(logits[no], 0)).item()

    return of


def score(name: str, items: list[tuple], options: dict[str, Any], **settings: Any) -> list[Score]:
    fields = ("prompt", *{"pairwise": ["anchor"], "genrm": ["reference"]}.get(name, []))
    options = options if name == "reward_model" else {**WORDS, **options}
    with start_runner(name, RunnerSettings(timeout_s=60.0, **settings), options=options, row_fields=fields) as runner:
        return runner.submit(items).result()


@pytest.mark.parametrize("tokenizer", ["server", "local"])
def test_the_score_is_the_softmax_of_the_judgments_logits(server, model_path, probability, tokenizer):
    items = [(f"the answer is {n}", str(n * n), {"prompt": f"{n}+{n}="}) for n in range(12)]
    options = {"tokenizer_path": str(model_path)} if tokenizer == "local" else {"template": PLAIN_TEMPLATE}
    scores = score("genrm", items, {"url": server.url, **options})
    template = options.get("template", JUDGE_TEMPLATE)
    expected = [probability(render_judge(fields["prompt"], text, ref, template)) for text, ref, fields in items]
    assert [s.value for s in scores] == pytest.approx(expected, abs=PROBABILITY_TOLERANCE)
    assert len({round(value, 3) for value in expected}) > 3  # the judge does tell texts apart
    assert all(0 < s.metrics["judgement_mass"] < 1 for s in scores)


def test_pairwise_laws_hold_on_a_real_judge(server, model_path, probability):
    texts = ["first answer", "2", "a rather long answer, of several words", "no"]
    items = [(a, b, {"prompt": "which one?"}) for a in texts for b in texts]
    scores = score("pairwise", items, {"url": server.url, "tokenizer_path": str(model_path)})
    table = {(a, b): s for (a, b, _), s in zip(items, scores, strict=True)}
    for a in texts:
        assert table[a, a].value == 0.5
        for b in texts:
            forward, backward = (probability(render_pairwise("which one?", *pair)) for pair in ((a, b), (b, a)))
            assert table[a, b].value == pytest.approx(0.5 * (forward + 1 - backward), abs=PROBABILITY_TOLERANCE)
            assert table[a, b].value + table[b, a].value == pytest.approx(1.0, abs=2 * PROBABILITY_TOLERANCE)
            assert 0 <= table[a, b].value <= 1
            gap = abs(forward - (1 - backward))
            assert table[a, b].metrics["position_gap"] == pytest.approx(gap, abs=2 * PROBABILITY_TOLERANCE)


def test_verifier_and_judge_score_one_batch_by_type(server):
    judge = RewardRouteConfig("pairwise", {"url": server.url, **WORDS}, timeout_s=60.0)
    config = RewardConfig(by_type={"math": RewardRouteConfig("math"), "general": judge}, require_think=True)
    items = [
        ScoreItem("<think>2+2</think>4", "4", "2+2", "math"),
        ScoreItem("<think>?</think>hello", "", "say hello", "general", {"anchor": "hi"}),
        ScoreItem("4", "4", "2+2", "math"),
        ScoreItem("hello", "", "say hello", "general", {"anchor": "hi"}),
        ScoreItem("<think>?</think>hi", "", "say hello", "general", {"anchor": "hi"}),
    ]
    with build_rewards(config) as rewards:
        scores = asyncio.run(rewards.score_many(items))
    assert [s.value for s in scores] == [1.0, pytest.approx(0.5, abs=0.5), 0.0, 0.0, 0.5]
    assert [s.detail.partition(":")[0] for s in scores] == ["math", "pairwise", "math", "pairwise", "pairwise"]


def test_a_text_that_does_not_fit_the_judge_is_unscored(server):
    items = [("word " * 400, "ref", {"prompt": "p"}), ("short", "ref", {"prompt": "p"})]
    long, short = score("genrm", items, {"url": server.url})
    assert long.value is None and "1024" in long.error
    assert short.value is not None


def test_a_generative_model_is_no_reward_model(server, model_path):
    with pytest.raises(RewardError, match="serves no reward model.*ForSequenceClassification"):
        score("reward_model", [], {"url": server.url, "tokenizer_path": str(model_path)})


def test_judgment_words_of_several_tokens_are_refused(server):
    with pytest.raises(TemplateError, match="'YES' is 3 tokens"):
        score("genrm", [], {"url": server.url, "yes_words": ["YES"]})


def test_a_killed_judge_leaves_responses_unscored_until_its_restart(server):
    """Last: it kills the server."""
    item = ("hello", "ref", {"prompt": "p"})
    options = {"url": server.url, **WORDS}
    with start_runner("genrm", RunnerSettings(timeout_s=20.0), options=options, row_fields=("prompt",)) as runner:
        (before,) = runner.submit([item]).result()
        server.stop(grace_s=0.0)
        (down,) = runner.submit([item]).result()
        assert down.value is None and "no answer" in down.error
        with pytest.raises(RewardError, match="is its server up"):
            score("genrm", [], {"url": server.url})
        with preloading():
            server.start()
        (after,) = runner.submit([item]).result()
    assert math.isclose(before.value, after.value, abs_tol=PROBABILITY_TOLERANCE)
