"""Trained tokens are those that SGLang returned: a proxy at its port records ids and log-probs, while programs speak three protocols."""

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from megatron_rl.agents.harness import EndpointOptions, Harness
from megatron_rl.config.schema import EnvironmentConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.rollout.generation import GenerationPlan, Sampling, make_dialogue
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.rollout.windows import TRAINING, WindowGenerator
from megatron_rl.step.packing import window_batch
from tests.chat_models import END_ID, VOCAB_SIZE, make_chat_model
from tests.integration.preloaded import serving
from tests.integration.test_rollout_server import slow_down
from tests.unit.agents.fake_run import services

START_TIMEOUT_S = 400.0
LOADED = "default"
"""Weight version of a server that loaded its weights from the model folder."""
THOUGHT_MARKS = ("<think>", "</think>")
MAX_TURN_TOKENS, WINDOW_TOKENS = 48, 20
CLIENT = Path(__file__).with_name("agent_client.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random model that thinks: every answer may have the end of thoughts, or be cut inside them."""
    folder = make_chat_model(tmp_path_factory.mktemp("model"))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    marks = [{"id": VOCAB_SIZE + i, "content": mark, **flags} for i, mark in enumerate(THOUGHT_MARKS)]
    file.write_text(json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], *marks]}))
    return folder


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[SglangServer]:
    options = ServerOptions(str(model), deterministic=True)
    with serving(SglangServer(options, tmp_path_factory.mktemp("log") / "log", start_timeout_s=START_TIMEOUT_S)) as server:
        yield server


@asynccontextmanager
async def recording_proxy(url: str):
    """A server before SGLang; ``sampled`` has (tokens before, ids, log-probs) of its samples, by trajectory."""
    sampled: dict[int, list[tuple[list[int], list[int], list[float]]]] = defaultdict(list)
    aborted: list[str] = []

    async def forward(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        async with session.request(request.method, url + request.path_qs, data=raw, headers=request.headers) as reply:
            text = await reply.read()
        if request.path == "/generate":
            sent, samples = json.loads(raw), json.loads(text)
            assert reply.status == 200 and len(samples) == len(sent["rid"]), text[:200]
            for rid, before, sample in zip(sent["rid"], sent["input_ids"], samples, strict=True):
                pairs = sample["meta_info"].get("output_token_logprobs", [])
                logprobs, ids = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
                assert ids == sample["output_ids"] and rid.startswith("train-")
                sampled[int(rid.split("-")[2])].append((before, ids, logprobs))
        elif request.path == "/abort_request":
            aborted.append(json.loads(raw)["rid"])
        return web.Response(body=text, status=reply.status, content_type=reply.content_type)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as session:
        yield SimpleNamespace(url=f"http://127.0.0.1:{runner.addresses[0][1]}", sampled=sampled, aborted=aborted)
    await runner.cleanup()


async def trained(
    harness: Harness,
    tokenizer: Tokenizer,
    url: str,
    modes: list[dict[str, Any]],
    max_turn_tokens: int = MAX_TURN_TOKENS,
    window_tokens: int = WINDOW_TOKENS,
) -> tuple[dict[int, Trajectory], dict[int, list[tuple[int, float]]]]:
    """Let a program per mode run in windows to its end. Returns the rows, and the tokens that train, by trajectory."""
    prompts = [Prompt(f"p{i}", (5,), text=json.dumps(mode), answer="1") for i, mode in enumerate(modes)]
    rows = {i: Trajectory(i, p, i, 0, 6000, dialogue=True, max_turn_tokens=max_turn_tokens) for i, p in enumerate(prompts)}
    tokens: dict[int, list[tuple[int, float]]] = defaultdict(list)
    dialogue = make_dialogue(harness, tokenizer, chat=True, limits=EnvironmentConfig(step_wait_s=0.2), in_windows=True)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(END_ID,), seed=5)

    def open_row(first: Trajectory, token_ids: Any) -> Trajectory:
        rows[len(rows)] = row = first.further_row(len(rows), token_ids)
        live.append(row)
        return row

    async with SglangClient([url], vocab_size=112, request_timeout_s=120) as client:
        for step in range(200):
            live = [row for row in rows.values() if not row.finished]
            if not live:
                return rows, tokens
            plan = GenerationPlan(sampling, tokenizer.decode, dialogue=dialogue)
            window = WindowGenerator(client, None, plan, step=step, num_tokens=window_tokens, weight_version=LOADED, kind=TRAINING)
            await window.generate(live, open_row=open_row)
            batch = window_batch(live, step)
            parts = [batch.fields[name].split(batch.lengths.tolist()) for name in ("mask", "rollout_logprobs")]
            for row, mask, logprobs in zip(live, *parts, strict=True):
                on = mask.numpy()
                tokens[row.id] += zip(row.token_ids[on].tolist(), logprobs.numpy()[on].tolist(), strict=True)
    raise AssertionError("the programs did not end")


def run(folder: Path, model: Path, server: SglangServer, modes: list[dict[str, Any]], return_s: float = 10.0, **options: Any):
    """The rows, their trained tokens, what the proxy saw, and the harness after the end of all programs."""

    async def main():
        tokenizer = Tokenizer(model)
        async with recording_proxy(server.url) as proxy:
            endpoint = EndpointOptions(tool_parser="qwen25", thought_parser="deepseek-r1")
            harness = Harness(command=[sys.executable, str(CLIENT)], endpoint=endpoint, num_programs=16)
            await harness.start(services(folder, tokenizer, server_urls=lambda: [proxy.url], max_response_tokens=6000))
            harness._endpoint.return_s = return_s
            try:
                rows, tokens = await trained(harness, tokenizer, proxy.url, modes, **options)
            finally:
                await harness.close()
            return rows, tokens, proxy

    return asyncio.run(asyncio.wait_for(main(), 400))


def without_dropped(samples, tokens, ends) -> list:
    """The samples of a row whose turns end with one of the ids ``ends``, without the tokens after one."""
    kept, rest = [], list(tokens)
    for before, ids, logprobs in samples:
        num = next((i for i in range(len(ids)) if rest[i : i + 1] != [(ids[i], float(np.float32(logprobs[i])))]), len(ids))
        assert num == len(ids) or ids[num - 1] in ends
        kept.append((before, ids[:num], logprobs[:num]))
        rest = rest[num:]
    return kept


def check_tokens(rows, tokens, proxy, stopped=(), ends=()) -> None:
    """Every id and log-prob that SGLang returned trains once, in its place, after the tokens that SGLang had before it.

    Rows in ``stopped`` have stop strings, which this server cannot see: tokens after one are not used.
    """
    assert set(proxy.sampled) == set(rows) == set(tokens)
    for number, row in rows.items():
        samples = without_dropped(proxy.sampled[number], tokens[number], ends) if number in stopped else proxy.sampled[number]
        returned = [(id, float(np.float32(p))) for _, ids, logprobs in samples for id, p in zip(ids, logprobs, strict=True)]
        assert tokens[number] == returned, f"row {number}"
        assert [id for id, on in zip(row.response_ids.tolist(), row.generated_mask(), strict=True) if on] == [id for id, _ in returned]
        whole = row.token_ids.tolist()
        assert all(whole[: len(before) + len(ids)] == [*before, *ids] for before, ids, _ in samples), f"row {number}"


LINEAR = [
    {"protocol": protocol, "stream": stream, "thoughts": thoughts, "name": f"{protocol} {i}"}
    for protocol in ("chat", "messages", "responses")
    for i, (stream, thoughts) in enumerate([(False, True), (True, True), (False, False), (True, False)])
]
LIMITED = [
    {"protocol": "chat", "stream": False, "thoughts": True, "fields": {"max_tokens": 7}, "name": "max_tokens"},
    {"protocol": "chat", "stream": True, "thoughts": True, "fields": {"stop": ["e", "a b"]}, "name": "stop"},
    {"protocol": "messages", "stream": True, "thoughts": True, "fields": {"stop_sequences": ["e"]}, "name": "stop_sequences"},
    {"protocol": "responses", "stream": False, "thoughts": True, "chain": True, "name": "previous_response_id"},
]
RETRIES = [{"protocol": p, "stream": s, "thoughts": True, "retry": True, "name": f"retry {p}"} for p, s in [("chat", 0), ("messages", 1)]]
FORKS = [{"protocol": p, "stream": False, "thoughts": True, "fork": True, "name": f"fork {p}"} for p in ("chat", "responses")]


@pytest.mark.timeout(900)
def test_trained_ids_and_logprobs_are_those_that_sglang_returned_each_once(tmp_path, model, server):
    modes = [*LINEAR, *LIMITED, *RETRIES, *FORKS]
    rows, tokens, proxy = run(tmp_path, model, server, modes)
    outputs = {path.parent.name: path.read_text() for path in (tmp_path / "agents").glob("*/output.txt")}
    assert {text.splitlines()[-1] for text in outputs.values()} == {"done"}, outputs
    tokenizer = Tokenizer(model)
    check_tokens(rows, tokens, proxy, {len(LINEAR) + 1, len(LINEAR) + 2}, tokenizer.encode("eb"))
    first_rows = [row for row in rows.values() if row.parent < 0]
    assert {row.graded_text for row in first_rows} == {"6 turns"} and all(len(row.turns()) >= 6 for row in first_rows)
    linear = len(LINEAR) + len(LIMITED) + len(RETRIES)
    num_rows = {i: 1 + sum(row.parent == i for row in rows.values()) for i in range(len(modes))}
    assert sum(num_rows[i] for i in range(linear)) <= 1.02 * linear
    assert all(num_rows[i] == 3 for i in range(linear, len(modes)))
    texts = {i: [tokenizer.decode(turn.token_ids.tolist()) for turn in rows[i].turns()] for i in range(len(LINEAR), linear)}
    assert max(turn.num_tokens for turn in rows[len(LINEAR)].turns()) == 7
    stopped = [text for i in (len(LINEAR) + 1, len(LINEAR) + 2) for text in texts[i]]
    assert all("e" not in text[:-1] for text in stopped) and any(text.endswith("e") for text in stopped)
    # Otherwise the run has not tried what it is for.
    turns = [turn for row in rows.values() for turn in row.turns()]
    assert {turn.finish_reason for turn in turns} == {"stop", "length"}
    assert any(len({segment.step for segment in turn.segments}) > 2 for turn in turns)
    assert sum("retried" in text for text in outputs.values()) == len(RETRIES)


@pytest.mark.timeout(600)
def test_sglang_is_told_of_a_client_that_left_and_its_row_is_unscored_while_the_program_goes_on(tmp_path, model, server):
    modes = [{"protocol": "chat", "stream": False, "thoughts": True, "leave": True, "turns": 2, "name": f"leaves {i}"} for i in range(4)]
    slow_down(server.url, 0.05)
    try:
        rows, tokens, proxy = run(tmp_path, model, server, modes, max_turn_tokens=400, window_tokens=400, return_s=0.3)
    finally:
        slow_down(server.url, 0.0)
    check_tokens(rows, tokens, proxy)
    left = [row for row in rows.values() if row.score is not None]
    assert left and proxy.aborted and all(row.parent < 0 and row.score.value is None and "left" in row.score.error for row in left)
    for row in left:
        (turn,) = row.turns()
        # 0.4 s until the client leaves, 0.3 s until it is given up, at most 0.2 s until the abort, and twice the time for a slow machine.
        assert turn.finish_reason == "abort" and turn.num_tokens < 40
        (other,) = [one for one in rows.values() if one.parent == row.id]
        assert other.graded_text == "2 turns" and len(other.turns()) == 2
