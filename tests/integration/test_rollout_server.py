"""A real SGLang server on the CPU: its samples, and its recovery after a kill."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megatron_rl.rollout.requests import Generation, GenerationRequest, RequestRejected, ServerError, ServerLost
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.process.attached_server import AttachedServer, disagreements, nccl_of
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer, group_members, is_healthy
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.tiny_models import DEFAULT_CONFIG, make_tiny_model

VOCAB_SIZE = DEFAULT_CONFIG["vocab_size"]
CONTEXT_TOKENS = DEFAULT_CONFIG["max_position_embeddings"]
PROMPT = (5, 17, 40, 9, 33, 12)
START_TIMEOUT_S = 400.0
LOGPROB_TOLERANCE = 1e-4
NCCL = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("log") / "sglang.log"
    options = ServerOptions(str(model_path), deterministic=True, nccl=NCCL)
    server = SglangServer(options, log_path, start_timeout_s=START_TIMEOUT_S)
    try:
        server.start()
        yield server
    finally:
        server.stop(grace_s=0.0)


@pytest.fixture(scope="module")
def reference(model_path):
    declare_torchvision_ops()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path).eval()


@torch.no_grad()
def reference_logits(model, prompt, response) -> torch.Tensor:
    """[response tokens, vocabulary]: logits that each response token was sampled from."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0]
    return logits[len(prompt) - 1 : -1]


def test_a_server_reports_the_settings_that_an_attaching_run_compares(server):
    """SGLang's names of these fields, and that it takes the labels as a place for NCCL's variables."""
    info = AttachedServer(server.url).server_info()
    assert nccl_of(info) == NCCL
    assert (info["tp_size"], info["pp_size"], info["dp_size"], info["device"]) == (1, 1, 1, "cpu")
    assert info["enable_memory_saver"] is info["enable_symm_mem"] is info["enable_nccl_nvls"] is False
    assert not list(disagreements(info, server.options, broadcasts=True))


def request_of(rid: str, prompt=PROMPT, **changes: Any) -> GenerationRequest:
    return GenerationRequest(rid=rid, input_ids=tuple(prompt), **{"max_new_tokens": 12, "seed": 1, **changes})


def run(url: str, scenario: Callable[[SglangClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with SglangClient([url], vocab_size=VOCAB_SIZE, request_timeout_s=60, **options) as client:
            return await asyncio.wait_for(scenario(client), 120)

    return asyncio.run(main())


def generate(url: str, *requests: GenerationRequest) -> list[SimpleNamespace]:
    async def scenario(client: SglangClient) -> list[Generation]:
        return await asyncio.gather(*[client.generate(request) for request in requests])

    return [in_numbers(generation) for generation in run(url, scenario)]


def in_numbers(generation: Generation) -> SimpleNamespace:
    """``generation`` with tuples instead of arrays, which can be compared and concatenated."""
    fields = {name: tuple(value.tolist()) if isinstance(value, np.ndarray) else value for name, value in vars(generation).items()}
    return SimpleNamespace(**fields)


def test_a_server_left_paused_by_a_killed_run_resumes_when_a_run_attaches(server):
    """The state after a SIGKILL during a publish into a window (schedule.weight_update=in_flight)."""
    body = json.dumps({"mode": "retract"}).encode()
    call = urllib.request.Request(f"{server.url}/pause_generation", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(call, timeout=30).close()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(generate, server.url, request_of("paused"))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=1.0)
        AttachedServer(server.url).go_on()
        (generation,) = waiting.result(timeout=60)
    assert len(generation.token_ids) == 12


def slow_down(url: str, seconds_per_forward: float) -> None:
    body = json.dumps({"forward_sleep_time": seconds_per_forward}).encode()
    call = urllib.request.Request(f"{url}/slow_down", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(call, timeout=30).close()


def num_running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/loads", timeout=30) as response:
        return json.load(response)["loads"][0]["num_running_reqs"]


async def until_running(url: str, num_requests: int) -> None:
    """Wait until the server works on so many requests."""
    deadline = time.monotonic() + 60
    while await asyncio.to_thread(num_running, url) < num_requests:
        assert time.monotonic() < deadline, f"{url} did not start {num_requests} requests within 60 s"
        await asyncio.sleep(0.05)


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Processes among ``pids`` that are still running after ``timeout_s``."""

    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + timeout_s
    while (living := [pid for pid in pids if lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return living


def test_greedy_tokens_and_logprobs_equal_transformers(server, reference):
    prompts = [PROMPT, PROMPT[:1], tuple(range(3, 70))]
    requests = [request_of(f"greedy-{i}", prompt, temperature=0.0) for i, prompt in enumerate(prompts)]
    for prompt, generation in zip(prompts, generate(server.url, *requests), strict=True):
        logits = reference_logits(reference, prompt, generation.token_ids)
        assert generation.token_ids == tuple(logits.argmax(-1).tolist())
        check_logprobs(generation, logits, temperature=1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_equal_transformers(server, reference, temperature):
    requests = [request_of(f"sampled-{temperature}-{i}", seed=i, temperature=temperature) for i in range(8)]
    generations = generate(server.url, *requests)
    assert len({generation.token_ids for generation in generations}) > 1
    for generation in generations:
        check_logprobs(generation, reference_logits(reference, PROMPT, generation.token_ids), temperature)


def check_logprobs(generation: Generation, logits: torch.Tensor, temperature: float) -> None:
    tokens = torch.tensor(generation.token_ids)
    expected = torch.log_softmax(logits.double() / temperature, -1).gather(1, tokens[:, None])[:, 0]
    difference = (torch.tensor(generation.logprobs, dtype=torch.float64) - expected).abs().max()
    assert difference < LOGPROB_TOLERANCE


def test_a_seed_gives_the_same_tokens_in_any_batch(server):
    (alone,) = generate(server.url, request_of("alone", seed=11))
    together = generate(server.url, *[request_of(f"together-{seed}", seed=seed) for seed in range(20)])
    assert together[11].token_ids == alone.token_ids
    assert len({generation.token_ids for generation in together}) == 20


def test_a_stop_token_in_the_last_slot_gives_stop(server):
    (free,) = generate(server.url, request_of("free", seed=5))
    last = next(i for i in range(2, 12) if free.token_ids[i] not in free.token_ids[:i])
    stop = (free.token_ids[last],)
    at_the_end, inside = generate(
        server.url,
        request_of("end", seed=5, max_new_tokens=last + 1, stop_token_ids=stop),
        request_of("inside", seed=5, max_new_tokens=last + 5, stop_token_ids=stop),
    )
    assert free.finish_reason == "length"
    assert at_the_end.finish_reason == inside.finish_reason == "stop"
    assert at_the_end.token_ids == inside.token_ids == free.token_ids[: last + 1]


def test_a_response_continues_from_its_partial_output(server):
    (whole,) = generate(server.url, request_of("whole", seed=21))
    (first,) = generate(server.url, request_of("first", seed=21, max_new_tokens=5))
    (rest,) = generate(server.url, request_of("rest", PROMPT + first.token_ids, seed=21, max_new_tokens=7))
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert first.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=LOGPROB_TOLERANCE)
    assert rest.cached_tokens > 0


def test_an_aborted_response_keeps_its_tokens_and_continues(server):
    num_tokens = 60

    async def cut(client: SglangClient) -> list[Generation]:
        calls = [
            asyncio.ensure_future(client.generate(request_of(f"cut-{i}", seed=i, max_new_tokens=num_tokens)))
            for i in range(3)
        ]
        await until_running(server.url, 3)
        await client.abort({"cut-0", "cut-1", "cut-2"})
        return await asyncio.gather(*calls)

    slow_down(server.url, 0.1)
    try:
        partial = [in_numbers(generation) for generation in run(server.url, cut)]
    finally:
        slow_down(server.url, 0.0)
    assert [generation.finish_reason for generation in partial] == ["abort"] * 3
    assert all(0 < len(generation.token_ids) < num_tokens for generation in partial)
    whole = generate(server.url, *[request_of(f"uncut-{i}", seed=i, max_new_tokens=num_tokens) for i in range(3)])
    rest = generate(
        server.url,
        *[
            request_of(f"go-on-{i}", PROMPT + p.token_ids, seed=i, max_new_tokens=num_tokens - len(p.token_ids))
            for i, p in enumerate(partial)
        ],
    )
    assert [p.token_ids + r.token_ids for p, r in zip(partial, rest, strict=True)] == [w.token_ids for w in whole]


def test_an_oversized_request_is_refused_and_the_rest_of_its_batch_is_served(server):
    async def scenario(client: SglangClient) -> list[Any]:
        too_long = request_of("too-long", [3] * (CONTEXT_TOKENS + 1))
        requests = [request_of("before"), too_long, request_of("after")]
        return await asyncio.gather(*[client.generate(r) for r in requests], return_exceptions=True)

    before, refused, after = run(server.url, scenario)
    before, after = in_numbers(before), in_numbers(after)
    assert isinstance(refused, RequestRejected) and str(CONTEXT_TOKENS) in str(refused)
    assert before.token_ids == after.token_ids and len(before.token_ids) == 12


def test_an_unknown_model_type_is_named_in_the_error(model_path, tmp_path):
    config = json.loads((model_path / "config.json").read_text())
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "strange", "architectures": ["Strange"]}))
    server = SglangServer(ServerOptions(str(folder)), tmp_path / "log", start_timeout_s=START_TIMEOUT_S)
    with pytest.raises(ServerError, match="(?s)exited with code.*Likely remedy.*model_type.*strange"):
        server.start()
    assert server.pid is None


def test_a_busy_server_is_not_hung_and_a_stopped_scheduler_is_detected_despite_health(server):
    """The process that answers HTTP lives on; only the scheduler is stopped."""

    async def scenario(client: SglangClient) -> list[Generation]:
        calls = [client.generate(request_of(f"busy-{i}", seed=i, max_new_tokens=60)) for i in range(4)]
        busy = await asyncio.gather(*calls)
        assert client.live_urls == [server.url]
        (scheduler,) = [p for p in map(psutil.Process, group_members(server.pid)) if "scheduler" in p.name()]
        scheduler.suspend()
        try:
            began = time.monotonic()
            with pytest.raises(ServerLost, match="the server hangs"):
                await client.generate(request_of("hung"))
            assert server.alive() and is_healthy(server.url, 5.0) and not await asyncio.to_thread(server.healthy)
            assert time.monotonic() - began < 60  # far below request_timeout_s
        finally:
            scheduler.resume()
        await asyncio.to_thread(slow_down, server.url, 0.0)
        client.restore(server.url)
        return [*busy, await client.generate(request_of("again", seed=0, max_new_tokens=60))]

    slow_down(server.url, 0.2)
    try:
        answers = run(server.url, scenario, hang_timeout_s=10.0)
    finally:
        slow_down(server.url, 0.0)
    assert answers[-1].token_ids.tolist() == answers[0].token_ids.tolist()


def test_a_server_of_which_a_process_is_killed_exits_is_reported_and_restarted(server):
    """The detokenizer, whose end SGLang notices itself: it exits at once, without its diagnostics of a minute."""
    lost: list[str] = []
    attached = ServerPool.attach([server.url], timeout_s=5.0)
    assert attached.servers[0].model_info()["weight_version"] == "default"
    (whole,) = generate(server.url, request_of("undisturbed", max_new_tokens=40))
    workers = group_members(server.pid)
    (victim,) = (pid for pid in workers if "detokenizer" in " ".join(psutil.Process(pid).cmdline()))
    incarnation = server.incarnation

    async def scenario(client: SglangClient) -> Generation:
        call = asyncio.ensure_future(client.generate(request_of("disturbed", max_new_tokens=40)))
        await until_running(server.url, 1)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(ServerLost, match=server.url):
            await asyncio.wait_for(call, 30)
        assert lost == [server.url] and client.live_urls == []
        assert wait_until_gone(workers, 10.0) == []
        while server.alive():  # its threads may end after its main one; START_TIMEOUT_S bounds the wait
            await asyncio.sleep(0.05)
        assert not attached.servers[0].healthy()
        await asyncio.to_thread(server.restart)
        with pytest.raises(ServerLost, match="not restored"):
            await client.generate(request_of("too-early"))
        client.restore(server.url)
        return await client.generate(request_of("again", max_new_tokens=40))

    slow_down(server.url, 0.1)
    options = {"on_server_lost": lambda url, reason: lost.append(url)}

    async def main() -> Generation:
        async with SglangClient([server.url], vocab_size=VOCAB_SIZE, **options) as client:
            return await asyncio.wait_for(scenario(client), START_TIMEOUT_S)

    again = in_numbers(asyncio.run(main()))
    assert again.token_ids == whole.token_ids
    assert server.incarnation == incarnation + 1
    assert attached.servers[0].healthy()
    assert attached.servers[0].incarnation == 2


PARENT = """
import sys, time
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
server = SglangServer(ServerOptions(sys.argv[1]), sys.argv[2])
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def test_the_server_ends_with_the_process_that_started_it(model_path, tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_path), str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    pids: list[int] = []
    try:
        pids = group_members(int(parent.stdout.readline()))
        assert len(pids) >= 3  # the server, its scheduler, its detokenizer
        parent.kill()
        assert wait_until_gone(pids, 10.0) == []
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        for pid in wait_until_gone(pids, 0.0):
            os.kill(pid, signal.SIGKILL)


def test_stop_leaves_no_process(server):
    """Last: the other tests need the server."""
    generate(server.url, request_of("before-stop"))  # SGLang installs its SIGTERM handler with the first request
    members = group_members(server.pid)
    assert len(members) >= 3
    server.stop()
    assert wait_until_gone(members, 0.0) == []
    assert not server.alive()
