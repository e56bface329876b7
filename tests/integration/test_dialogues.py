"""Dialogues, FIRE and over-sampling with a real SGLang server: the laws of tests/unit/rollout/test_windows.py hold there too."""

import asyncio
import json
import urllib.request
from dataclasses import replace

import pytest
import torch

from megatron_rl.config.schema import FireConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.environments.base import Environment, EnvironmentFault, Message
from megatron_rl.environments.calculator import Calculator
from megatron_rl.rollout.generation import GenerationPlan, Sampling, end_of_text, make_dialogue, single_token_stops
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.rollout.windows import WindowGenerator
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.integration.preloaded import serving
from tests.tiny_models import CHARACTERS, DEFAULT_CONFIG, EOS_TOKEN_ID, make_tiny_model

VOCAB_SIZE = DEFAULT_CONFIG["vocab_size"]
START_TIMEOUT_S = 400.0
LOGPROB_TOLERANCE = 1e-4
LOADED = "default"
"""Weight version of a server that loaded its weights from the model folder."""
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(EOS_TOKEN_ID,), seed=5)
HOT_TEMPERATURE, HOT_TOP_K = 30.0, 8


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    # All ids are characters, so that text and tokens are the same thing.
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=3 + len(CHARACTERS))


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return Tokenizer(model_path)


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    options = ServerOptions(str(model_path), deterministic=True, tokenizer=True)
    with serving(SglangServer(options, tmp_path_factory.mktemp("log") / "log", start_timeout_s=START_TIMEOUT_S)) as server:
        yield server


@pytest.fixture(scope="module")
def reference(model_path):
    declare_torchvision_ops()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path).eval()


class Vowels(Environment):
    """Answers every turn with a number; turns end with a vowel."""

    roles = ("policy", "verifier")
    stop_strings = ("a", "e", "i", "o", "u")

    def respond(self, prompt, turns):
        return None if len(turns) == 4 else Message(f"({len(turns)})", next_role=self.roles[len(turns) % 2])

    def graded_text(self, prompt, turns, index):
        return turns[index].text

    def turn_reward(self, prompt, turns, index, grades):
        return grades[index]

    def outcome(self, prompt, turns, grades):
        return grades[max(grades)]


def new_trajectories(num, *, budget=48, dialogue=True):
    prompts = [Prompt(f"p{i}", (5, 17, 40 + i, 9)) for i in range(num)]
    return [Trajectory(i, p, i, 0, budget, dialogue=dialogue) for i, p in enumerate(prompts)]


def dialogue_with_text_stops(environment, tokenizer):
    """Make a dialogue as the service does, except for single-token stop strings, which the service sends as stop tokens."""
    made = make_dialogue(environment, tokenizer, chat=False)
    assert made.server_stops == ()
    return replace(made, server_stops=environment.stop_strings)


def generate(
    server, tokenizer, trajectories, *, window=100, steps=1, environment=None, fire=None, is_enough=None
):
    async def main():
        async with SglangClient([server.url], vocab_size=VOCAB_SIZE, request_timeout_s=120) as client:
            dialogue = dialogue_with_text_stops(environment, tokenizer) if environment else None
            plan = GenerationPlan(SAMPLING, tokenizer.decode, fire=fire, dialogue=dialogue)
            for step in range(steps):
                made = WindowGenerator(
                    client,
                    None,
                    plan,
                    step=step,
                    num_tokens=window,
                    weight_version=LOADED,
                    kind=f"test{id(trajectories)}",
                )
                await made.generate(trajectories, is_enough)

    asyncio.run(asyncio.wait_for(main(), 300))
    return trajectories


@torch.no_grad()
def expected_logprobs(reference, trajectory):
    """[response tokens]: at temperature 1, given everything before."""
    tokens = torch.from_numpy(trajectory.token_ids)[None].long()
    logprobs = torch.log_softmax(reference(tokens).logits[0].double(), -1)
    start = len(trajectory.prompt.token_ids)
    return logprobs[start - 1 : -1].gather(1, tokens[0, start:, None])[:, 0]


def parts_of(trajectory):
    return (
        trajectory.response_ids.tolist(),
        trajectory.generated_mask().tolist(),
        [(turn.role, turn.token_ids.tolist()) for turn in trajectory.turns()],
        trajectory.env_done,
    )


def test_a_dialogue_in_windows_equals_the_dialogue_without_windows_token_for_token(
    server, tokenizer, reference
):
    whole = generate(server, tokenizer, new_trajectories(6), environment=Vowels())
    pieces = generate(server, tokenizer, new_trajectories(6), environment=Vowels(), window=5, steps=12)
    assert [parts_of(t) for t in pieces] == [parts_of(t) for t in whole]
    assert any(len(t.turns()) > 1 for t in whole) and all(t.finished for t in pieces)
    for t in (*whole, *pieces):
        generated = torch.from_numpy(t.generated_mask())
        difference = torch.from_numpy(t.rollout_logprobs()).double() - expected_logprobs(reference, t)
        assert difference[generated].abs().max() < LOGPROB_TOLERANCE
        for turn in t.turns()[:-1]:
            assert turn.finish_reason == "stop"
            assert tokenizer.decode(turn.token_ids[-1:].tolist()) in (*Vowels.stop_strings, "")
        messages = "".join(f"({i})" for i in range(1, len(t.turns()) + (t.segments[-1].role == "environment")))
        assert tokenizer.decode([x for x, own in zip(t.response_ids.tolist(), t.generated_mask()) if not own]) == messages


def test_only_stop_strings_of_several_tokens_are_sent_to_the_server(tokenizer):
    assert single_token_stops(("a", "ab"), tokenizer) == {"a": tokenizer.encode("a")[0]}
    assert make_dialogue(Calculator(close_tag=")"), tokenizer, chat=False).server_stops == ()
    assert make_dialogue(Calculator(close_tag="end"), tokenizer, chat=False).server_stops == ("end",)
    with pytest.raises(EnvironmentFault, match="'</calc>' becomes 'calc'"):
        make_dialogue(Calculator(close_tag="</calc>"), tokenizer, chat=False)


def test_hot_tokens_are_sampled_hot_and_all_others_are_not(server, tokenizer, reference):
    banned = tuple(range(3, 13))
    fire = FireConfig(HOT_TEMPERATURE, HOT_TOP_K, after="", banned_token_ids=banned)
    fired = generate(server, tokenizer, new_trajectories(24, budget=6, dialogue=False), fire=fire)
    for t in fired:
        assert t.hot_mask().tolist() == [True] + [False] * (t.num_response_tokens - 1)
        with torch.no_grad():
            logits = reference(torch.tensor([t.prompt.token_ids])).logits[0, -1].double()
        logits[list(banned)] = float("-inf")
        top = logits.topk(HOT_TOP_K)
        hot = int(t.response_ids[0])
        assert hot in top.indices
        mu = torch.log_softmax(top.values / HOT_TEMPERATURE, -1)[top.indices == hot]
        assert float(mu) == pytest.approx(float(t.rollout_logprobs()[0]), abs=LOGPROB_TOLERANCE)
        difference = torch.from_numpy(t.rollout_logprobs()).double() - expected_logprobs(reference, t)
        assert t.num_response_tokens == 1 or difference[1:].abs().max() < LOGPROB_TOLERANCE


def test_fire_at_the_runs_own_temperature_changes_nothing(server, tokenizer):
    fire = FireConfig(SAMPLING.temperature, SAMPLING.top_k, after="", banned_token_ids=[])
    plain = generate(server, tokenizer, new_trajectories(12, dialogue=False))
    fired = generate(server, tokenizer, new_trajectories(12, dialogue=False), fire=fire)
    assert [t.response_ids.tolist() for t in fired] == [t.response_ids.tolist() for t in plain]
    for one, two in zip(fired, plain):
        assert one.rollout_logprobs() == pytest.approx(two.rollout_logprobs(), abs=LOGPROB_TOLERANCE)


def test_the_hot_token_comes_after_the_marker(server, tokenizer):
    plain = generate(server, tokenizer, new_trajectories(12, dialogue=False))
    ids = plain[0].response_ids.tolist()
    place = next(i for i in range(5, len(ids)) if min(ids[i], ids[i + 1]) > 2)  # two characters, no special token
    marker = tokenizer.decode(ids[place : place + 2])
    end = end_of_text(ids, [marker], tokenizer.decode)
    fire = FireConfig(HOT_TEMPERATURE, HOT_TOP_K, after=marker, banned_token_ids=[])
    whole = generate(server, tokenizer, new_trajectories(12, dialogue=False), fire=fire)
    pieces = generate(server, tokenizer, new_trajectories(12, dialogue=False), fire=fire, window=end - 1, steps=12)
    assert [t.response_ids.tolist() for t in pieces] == [t.response_ids.tolist() for t in whole]
    assert all(t.finished for t in pieces)
    assert whole[0].response_ids[:end].tolist() == ids[:end] and whole[0].hot_mask().nonzero()[0].tolist() == [end]


def slow_down(server, seconds_per_forward):
    body = json.dumps({"forward_sleep_time": seconds_per_forward}).encode()
    call = urllib.request.Request(f"{server.url}/slow_down", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(call, timeout=30).close()


def test_over_sampling_aborts_the_tail_and_loses_no_token(server, tokenizer):
    whole = new_trajectories(12, budget=40, dialogue=False)
    for t in whole[:6]:
        t.max_response_tokens = 4
    cut = [Trajectory(t.id, t.prompt, t.id, 0, t.max_response_tokens) for t in whole]
    generate(server, tokenizer, whole)
    long_ones = [i for i in range(6, 12) if whole[i].num_response_tokens > 20]
    assert len(long_ones) > 1
    slow_down(server, 0.1)
    try:
        generate(server, tokenizer, cut, is_enough=lambda: sum(t.finished for t in cut) >= 6)
    finally:
        slow_down(server, 0.0)
    assert all(t.finished for t in cut[:6])
    for i in long_ones:
        assert not cut[i].finished and 0 < cut[i].num_response_tokens < whole[i].num_response_tokens
        assert cut[i].segments[-1].finish_reason == "abort"
        assert cut[i].response_ids.tolist() == whole[i].response_ids[: cut[i].num_response_tokens].tolist()
    generate(server, tokenizer, cut)
    assert [t.response_ids.tolist() for t in cut] == [t.response_ids.tolist() for t in whole]
