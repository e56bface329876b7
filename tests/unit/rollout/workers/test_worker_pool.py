"""Calls through rollout workers give the same replies and errors as direct calls, also if processes are killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tokenizers
from aiohttp import web

from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import TokenParts
from megatron_rl.rollout.requests import (
    BatchCall,
    Generation,
    PromptMismatch,
    RequestImages,
    RequestRejected,
    RetryableRequestError,
    ServerBusy,
)
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.wire.response_validation import ApiKeyRejected, InvalidReply, NonFiniteLogprob
from megatron_rl.rollout.workers import worker_pool
from megatron_rl.rollout.workers.worker_pool import WorkerFailed, WorkerPool
from megatron_rl.system.http.json_http import ApiKey, HttpError, NoHttpReply
from tests.unit.rollout.sglang.balance.test_client import VOCAB_SIZE, FakeServer, Handler, answer_of, request_of

WAIT_S = 240


def run_with(
    handler: Handler | None,
    scenario: Callable[[SglangClient, str, list[str]], Awaitable[Any]],
    *,
    num_workers: int = 1,
    **options: Any,
) -> Any:
    """``scenario(client, url, warnings)`` with one fake server and one worker."""

    async def main() -> Any:
        server, warnings = FakeServer(handler), list[str]()
        url = await server.start()
        try:
            async with SglangClient([url], vocab_size=VOCAB_SIZE, **options) as client:
                client.first_pause_s = 0.01
                if num_workers:
                    client.caller = WorkerPool(num_workers, warnings.append)
                return await asyncio.wait_for(scenario(client, url, warnings), WAIT_S)
        finally:
            await server.stop()

    return asyncio.run(main())


def pool_of(client: SglangClient) -> WorkerPool:
    assert isinstance(client.caller, WorkerPool)
    return client.caller


async def until(condition: Callable[..., bool], *arguments: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition(*arguments):
            await asyncio.sleep(0.02)


def test_worker_replies_equal_those_of_the_event_loop() -> None:
    async def scenario(client: SglangClient, url: str, warnings: list[str]) -> list[Generation]:
        return await asyncio.gather(*[client.generate(request_of(f"r{i}", (i % 50, 1))) for i in range(100)])

    here, there = (run_with(None, scenario, num_workers=number) for number in (0, 1))
    assert [(list(a.token_ids), list(a.logprobs), a.weight_version) for a in there] == [
        (list(a.token_ids), list(a.logprobs), a.weight_version) for a in here
    ]


def test_errors_of_a_call_keep_their_type_across_processes() -> None:
    """Every kind that a call can end with, through one worker."""
    answers = {
        "fine": answer_of,
        "nan": lambda rid, ids: edited(rid, ids, output_token_logprobs=[[None, 3, None]]),
        "stale": lambda rid, ids: edited(rid, ids, weight_version="6"),
        "busy": lambda rid, ids: answer_of(rid, ids, {"type": "abort", "status_code": 503, "message": "full"}),
        "refused": lambda rid, ids: answer_of(rid, ids, {"type": "abort", "status_code": 400, "message": "no"}),
        "failed": lambda rid, ids: answer_of(rid, ids, {"type": "abort", "status_code": 500, "message": "oh"}),
        "other_id": lambda rid, ids: answer_of("somebody", ids),
    }
    expected = {
        "fine": Generation,
        "nan": NonFiniteLogprob,
        "stale": InvalidReply,
        "busy": ServerBusy,
        "refused": RequestRejected,
        "failed": RetryableRequestError,
        "other_id": InvalidReply,
    }

    def edited(rid: str, ids: list[int], **meta: Any) -> dict[str, Any]:
        answer = answer_of(rid, ids)
        answer["meta_info"] |= meta
        return answer

    async def handler(body: dict[str, Any]) -> web.Response:
        rids = body["rid"]
        if rids == ["teapot"]:
            return web.Response(status=418, text="x" * 1000, headers={"Retry-After": "7"})
        if rids == ["noise"]:
            return web.Response(text="<html>")
        if rids == ["slow"]:
            await asyncio.sleep(5)
        return web.json_response([answers[rid](rid, ids) for rid, ids in zip(rids, body["input_ids"], strict=True)])

    async def scenario(client: SglangClient, url: str, warnings: list[str]) -> None:
        pool = pool_of(client)

        def call_of(*rids: str, timeout_s: float = WAIT_S, at: str = url) -> BatchCall:
            requests = [request_of(rid, (1, 2), weight_version="7") for rid in rids]
            return BatchCall(at, requests, rids, timeout_s, VOCAB_SIZE, ApiKey(""))

        reply = await pool.call(call_of(*answers))
        assert {name: type(sample) for name, sample in zip(answers, reply.samples, strict=True)} == expected
        teapot = await pool.call(call_of("teapot"))
        assert (teapot.status, len(teapot.text), teapot.retry_after_s) == (418, 500, 7.0)
        with pytest.raises(InvalidReply, match="<html>"):
            await pool.call(call_of("noise"))
        with pytest.raises(NoHttpReply) as late:
            await pool.call(call_of("slow", timeout_s=0.1))
        assert late.value.timed_out
        with pytest.raises(NoHttpReply) as nobody:
            await pool.call(call_of("fine", at="http://127.0.0.1:9"))
        assert not nobody.value.timed_out
        with pytest.raises(HttpError):
            await pool.call(call_of("fine", at="nonsense://"))
        assert not warnings and len(pool.pids) == 1

    run_with(handler, scenario)


def test_rejected_key_and_mismatched_prompt_end_the_request() -> None:
    async def handler(body: dict[str, Any]) -> web.Response:
        if body["rid"] == ["key;"]:
            return web.Response(status=401)
        answer = answer_of(body["rid"][0], body["input_ids"][0])
        answer["meta_info"]["prompt_tokens"] = 99
        return web.json_response([answer])

    async def scenario(client: SglangClient, url: str, warnings: list[str]) -> None:
        with pytest.raises(ApiKeyRejected):
            await client.generate(request_of("key"))
        with pytest.raises(PromptMismatch):
            await client.generate(request_of("images", images=RequestImages(token_id=50)))

    run_with(handler, scenario)


def test_workers_decode_tokens_like_the_tokenizer(tmp_path: Path) -> None:
    """Also special tokens, invalid UTF-8 and empty sequences, and after a worker was killed."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(tmp_path)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, tokenizer.vocab_size, size=n).astype(np.int32) for n in (*range(40), 500)]
    parts = [TokenParts([one[:3], one[3:]]) for one in sequences]

    async def main() -> list[str]:
        warnings: list[str] = []
        pool = WorkerPool(2, warnings.append)
        try:
            first = await pool.texts(tokenizer.as_json, parts)
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
            assert await pool.texts(tokenizer.as_json, parts) == first and len(warnings) == 2
            return first
        finally:
            await pool.close()

    assert asyncio.run(main()) == [tokenizer.decode(one.tolist()) for one in sequences]


def test_known_tokens_of_a_response_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that a worker has read from a server pass no socket to or from the driver."""

    async def handler(body: dict[str, Any]) -> web.Response:
        answers = [answer_of(*pair) for pair in zip(body["rid"], body["input_ids"], strict=True)]
        for answer, params in zip(answers, body["sampling_params"], strict=True):
            answer["output_ids"] *= params["max_new_tokens"]
            answer["meta_info"]["output_token_logprobs"] *= params["max_new_tokens"]
        return web.json_response(answers)

    async def scenario(client: SglangClient, url: str, warnings: list[str]) -> None:
        await client.generate(request_of("first"))
        sent: list[int] = []
        write = asyncio.StreamWriter.writelines
        monkeypatch.setattr(
            asyncio.StreamWriter, "writelines", lambda to, data: (sent.append(sum(map(len, data))), write(to, data))
        )
        parts = [np.array([3, 4], np.int32)]
        for window in range(3):
            request = request_of(f"r{window}", TokenParts(parts), max_new_tokens=5000)
            answer = await client.generate(request)
            assert list(answer.token_ids) == [int(sum(np.asarray(request.input_ids))) % VOCAB_SIZE] * 5000
            parts = [*parts, answer.token_ids]
        assert sum(sent) < 3 * 2000, "also with the messages about dropped log-probs"

    run_with(handler, scenario)


class Gate:
    """A handler that replies only once it is open, and records the request ids."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.open = asyncio.Event()

    async def __call__(self, body: dict[str, Any]) -> None:
        self.seen.extend(body["rid"])
        await self.open.wait()

    def has_seen(self, number: int) -> bool:
        return len(self.seen) == number


def test_killed_worker_loses_no_request() -> None:
    """Requests in progress are resent under other ids and do not count as failures of the server."""
    gate = Gate()

    async def scenario(client: SglangClient, url: str, warnings: list[str]) -> None:
        requests = [request_of(f"r{i}", (i, 1), max_new_tokens=500) for i in range(8)]
        tasks = [asyncio.create_task(client.generate(request)) for request in requests]
        for num_deaths in range(1, 4):
            await until(gate.has_seen, 8 * num_deaths)
            (pid,) = pool_of(client).pids
            os.kill(pid, signal.SIGKILL)
            await until(lambda number: len(warnings) == number, num_deaths)
            assert f"(process {pid}) died of SIGKILL" in warnings[-1] and "its 8 requests" in warnings[-1]
        await until(gate.has_seen, 8 * 4)
        gate.open.set()
        answers = await asyncio.gather(*tasks)
        assert [list(answer.token_ids) for answer in answers] == [[i + 1] for i in range(8)]
        assert len(set(gate.seen)) == 8 * 4, "a server rejects a duplicate id"
        assert client.live_urls == [url]

    run_with(gate, scenario, max_retries=0)


def test_worker_that_always_crashes_is_not_restarted_forever() -> None:
    gate = Gate()

    async def scenario(client: SglangClient, url: str, warnings: list[str]) -> None:
        task = asyncio.create_task(client.generate(request_of("r")))
        for num_deaths in range(1, 6):
            await until(gate.has_seen, num_deaths)
            os.kill(pool_of(client).pids[0], signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=r"5 times without a reply.*rollout.num_workers=0"):
            await task

    run_with(gate, scenario)


def test_blocked_worker_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_SILENCE_S", 30.0)
    gate = Gate()

    async def scenario(client: SglangClient, url: str, warnings: list[str]) -> Generation:
        task = asyncio.create_task(client.generate(request_of("r")))
        await until(gate.has_seen, 1)
        (pid,) = pool_of(client).pids
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(worker_pool, "_SILENCE_S", 2.0)  # now: a busy machine takes longer to start the worker
        await until(lambda: len(warnings) == 1)
        monkeypatch.setattr(worker_pool, "_SILENCE_S", 120.0)
        assert "was killed: it did nothing for 2 s" in warnings[0]
        await until(gate.has_seen, 2)
        gate.open.set()
        return await task

    assert list(run_with(gate, scenario).token_ids) == [7]


def test_cancelled_call_ends_its_request_at_the_server() -> None:
    gate = Gate()

    async def scenario(client: SglangClient, url: str, warnings: list[str]) -> None:
        call = BatchCall(url, [request_of("r")], ["r"], WAIT_S, VOCAB_SIZE, ApiKey(""))
        task = asyncio.create_task(pool_of(client).call(call))
        await until(gate.has_seen, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        worker = psutil.Process(*pool_of(client).pids)
        await until(lambda: not worker.net_connections("tcp"))  # the server then aborts the request
        gate.open.set()
        assert list((await client.generate(request_of("next"))).token_ids) == [7]
        assert not warnings

    run_with(gate, scenario)


_OWNER = """
import asyncio, sys
from megatron_rl.rollout.requests import BatchCall
from megatron_rl.rollout.requests import GenerationRequest
from megatron_rl.rollout.workers.worker_pool import WorkerPool
from megatron_rl.system.http.json_http import ApiKey

async def main():
    pool = WorkerPool(1, print)
    call = BatchCall(sys.argv[1], [GenerationRequest("r", (1, 2), 4)], ["r"], 60.0, 100, ApiKey(""))
    task = asyncio.create_task(pool.call(call))
    while not pool.pids:
        await asyncio.sleep(0.01)
    print(*pool.pids, flush=True)
    await task

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_worker_exits_with_its_owner(stopped: bool) -> None:
    """For any end of the owner, and also if the worker's event loop is blocked."""
    gate = Gate()

    async def main() -> None:
        server = FakeServer(gate)
        url = await server.start()
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", _OWNER, url, stdout=subprocess.PIPE)
        assert owner.stdout is not None
        worker = psutil.Process(int(await asyncio.wait_for(owner.stdout.readline(), WAIT_S)))
        await until(gate.has_seen, 1)
        for number in (signal.SIGINT, signal.SIGTERM):  # these are its owner's to handle
            worker.send_signal(number)
        await asyncio.sleep(0.1)
        assert worker.is_running()
        if stopped:
            worker.suspend()
        owner.kill()
        await until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
        await owner.wait()
        gate.open.set()
        await server.stop()

    asyncio.run(main())
