"""Laws of the client, against a small HTTP server that imitates SGLang."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from megatron_rl.rollout.requests import (
    Generation,
    GenerationRequest,
    PromptMismatch,
    RequestImages,
    RequestRejected,
    ServerLost,
)
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.process.liveness import PROBE_RID
from megatron_rl.rollout.sglang.wire.protocol import generate_body, parse_generation, validate
from megatron_rl.rollout.sglang.wire.response_validation import ApiKeyRejected, InvalidReply

VOCAB_SIZE = 100
Handler = Callable[[dict[str, Any]], Awaitable[web.Response | None]]


def request_of(rid: str = "r", input_ids: tuple[int, ...] = (3, 4), **changes: Any) -> GenerationRequest:
    return GenerationRequest(rid=rid, input_ids=input_ids, **{"max_new_tokens": 2, **changes})


def answer_of(rid: str, input_ids: list[int], finish: dict[str, Any] | None = None) -> dict[str, Any]:
    """One generated token: the sum of the prompt."""
    token = sum(input_ids) % VOCAB_SIZE
    meta = {
        "id": rid,
        "finish_reason": finish or {"type": "length", "length": 1},
        "weight_version": "7",
        "cached_tokens": 1,
        "output_token_logprobs": [[-0.5, token, None]],
    }
    return {"output_ids": [token], "meta_info": meta}


class FakeServer:
    """Replies to /generate; ``handler`` gets the body first and may reply instead."""

    def __init__(self, handler: Handler | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.controls: list[str] = []
        self.num_inflight = 0
        self.max_inflight = 0
        self.healthy = True
        self.handler = handler
        self.probe_s: float | None = 0.0
        """Seconds until a token probe is answered; None refuses the probe immediately."""
        self.scheduler_works = True
        self.num_running = 0
        """Number of running requests that the server reports."""

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health_generate)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/{control}", self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _health(self, http_request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _health_generate(self, http_request: web.Request) -> web.Response:
        return web.Response(status=200 if self.scheduler_works else 503)

    async def _loads(self, http_request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.num_running, "num_waiting_reqs": 0}]})

    async def _control(self, http_request: web.Request) -> web.Response:
        self.controls.append(http_request.match_info["control"])
        return web.Response()

    async def _generate(self, http_request: web.Request) -> web.Response:
        body = await http_request.json()
        if body["rid"][0].startswith(PROBE_RID):
            if self.probe_s is None:
                return web.Response(status=500)
            await asyncio.sleep(self.probe_s)
            return web.json_response([{"output_ids": [1]}])
        self.bodies.append(body)
        self.num_inflight += len(body["rid"])
        self.max_inflight = max(self.max_inflight, self.num_inflight)
        try:
            if self.handler is not None and (response := await self.handler(body)) is not None:
                return response
            return web.json_response([answer_of(*pair) for pair in zip(body["rid"], body["input_ids"], strict=True)])
        finally:
            self.num_inflight -= len(body["rid"])


def run_with(
    servers: list[FakeServer],
    scenario: Callable[[SglangClient, list[str]], Awaitable[Any]],
    *,
    max_batch_size: int = 32,
    **options: Any,
) -> Any:
    """Run ``scenario(client, urls)`` against the started servers and stop everything."""

    async def main() -> Any:
        urls = [await server.start() for server in servers]
        try:
            async with SglangClient(urls, **{"vocab_size": VOCAB_SIZE, **options}) as client:
                client.first_pause_s, client.max_batch_size = 0.01, max_batch_size
                return await asyncio.wait_for(scenario(client, urls), 20)
        finally:
            for server in servers:
                await server.stop()

    return asyncio.run(main())


def generate_many(num: int, **request_changes: Any) -> Callable[[SglangClient, list[str]], Awaitable[list[Generation]]]:
    async def scenario(client: SglangClient, urls: list[str]) -> list[Generation]:
        requests = [request_of(f"r{i}", (i % 50, 1), **request_changes) for i in range(num)]
        return await asyncio.gather(*[client.generate(request) for request in requests])

    return scenario


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"input_ids": (3, VOCAB_SIZE)}, r"input_ids\[1\] is 100"),
        ({"input_ids": (-1,)}, r"input_ids\[0\] is -1"),
        ({"input_ids": ()}, "empty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
    ],
)
def test_request_that_could_harm_the_server_is_never_sent(changes, names):
    server = FakeServer()

    async def scenario(client, urls):
        with pytest.raises(RequestRejected, match=names):
            await client.generate(request_of(**changes))

    run_with([server], scenario)
    assert server.bodies == []


def test_a_valid_request_passes_validation():
    validate(request_of(input_ids=(0, VOCAB_SIZE - 1), temperature=0.0), VOCAB_SIZE)


IMAGE_TOKEN = 9


def with_images(rid="r", input_ids=(3, IMAGE_TOKEN, 4), data=("aW1n",), num_tokens=6):
    return request_of(rid, input_ids, images=RequestImages(IMAGE_TOKEN, data, num_tokens), prompt_name="rows.jsonl:7")


def test_image_tokens_without_their_images_are_never_sent():
    validate(with_images(), VOCAB_SIZE)
    validate(with_images(input_ids=(3, 4), data=(), num_tokens=0), VOCAB_SIZE)
    for bad in (with_images(input_ids=(3, IMAGE_TOKEN, IMAGE_TOKEN)), with_images(data=()), with_images(input_ids=(3,))):
        with pytest.raises(RequestRejected, match="image tokens for [01] images"):
            validate(bad, VOCAB_SIZE)


def test_images_travel_next_to_the_ids_and_text_prompts_have_none():
    text = with_images("b", input_ids=(3, 4), data=(), num_tokens=0)
    body = generate_body([text, with_images("a")], ["b", "a"])
    assert body["image_data"] == [[], ["aW1n"]]
    assert "image_data" not in generate_body([text, request_of("c")], ["b", "c"])


def test_prompt_length_mismatch_is_rejected_with_the_prompt_source():
    answer = answer_of("r", [3, IMAGE_TOKEN, 4])
    answer["meta_info"]["prompt_tokens"] = 8
    assert parse_generation(with_images(), answer).token_ids
    answer["meta_info"]["prompt_tokens"] = 10
    with pytest.raises(PromptMismatch, match="rows.jsonl:7: 8 tokens here, but 10 on the server.*preprocessor_config"):
        parse_generation(with_images(), answer)


def test_a_seed_is_sent_only_if_given():
    requests = [request_of("a"), request_of("b", seed=0, stop_token_ids=(1,))]
    params = generate_body(requests, ["a", "b"])["sampling_params"]
    assert "sampling_seed" not in params[0]
    assert params[1]["sampling_seed"] == 0
    assert params[1]["stop_token_ids"] == [1]


def test_stop_token_at_the_last_position_means_stop():
    answer = answer_of("r", [3, 4])
    assert parse_generation(request_of(stop_token_ids=(7,)), answer).finish_reason == "stop"
    assert parse_generation(request_of(stop_token_ids=(8,)), answer).finish_reason == "length"


def test_an_abort_returns_its_partial_output():
    cut = parse_generation(request_of(), answer_of("r", [3, 4], {"type": "abort", "message": "Aborted"}))
    assert (cut.token_ids.tolist(), cut.logprobs.tolist()) == ([7], [-0.5])
    assert (cut.finish_reason, cut.weight_version, cut.cached_tokens) == ("abort", "7", 1)
    queued = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "7"}}
    nothing = parse_generation(request_of(), queued)
    assert (len(nothing.token_ids), len(nothing.logprobs)) == (0, 0)
    assert (nothing.finish_reason, nothing.weight_version, nothing.cached_tokens) == ("abort", "7", 0)


@pytest.mark.parametrize(("reported", "seconds"), [(1.5, 1.5), (None, 0.0), ("soon", 0.0), (-1, 0.0), (float("nan"), 0.0), ([2], 0.0)])
def test_invalid_server_seconds_are_ignored(reported, seconds):
    answer = answer_of("r", [3, 4], {"type": "stop", "matched": 7})
    answer["meta_info"]["e2e_latency"] = reported
    assert parse_generation(request_of(stop_token_ids=(4,)), answer).seconds == seconds


@pytest.mark.parametrize("logprob", [None, math.nan, -math.inf])
def test_a_logprob_that_is_not_finite_is_an_error(logprob):
    answer = answer_of("r", [3, 4])
    answer["meta_info"]["output_token_logprobs"][0][0] = logprob
    with pytest.raises(InvalidReply, match="not finite"):
        parse_generation(request_of(), answer)


def test_tokens_without_logprobs_are_an_error():
    answer = answer_of("r", [3, 4])
    answer["meta_info"]["output_token_logprobs"] = []
    with pytest.raises(InvalidReply, match="1 tokens and 0 log-probs"):
        parse_generation(request_of(), answer)


def test_concurrent_calls_share_http_requests_and_each_gets_its_own_answer():
    server = FakeServer()
    generations = run_with([server], generate_many(40), max_batch_size=16)
    assert [generation.token_ids for generation in generations] == [(i + 1,) for i in range(40)]
    assert sorted(len(body["rid"]) for body in server.bodies) == [8, 16, 16]


def test_at_most_max_inflight_requests_are_in_progress():
    async def slow(body):
        await asyncio.sleep(0.01)

    server = FakeServer(slow)
    generations = run_with([server], generate_many(50), max_inflight_requests=8, max_batch_size=4)
    assert len(generations) == 50
    assert server.max_inflight == 8


def test_the_least_loaded_server_is_chosen():
    servers = [FakeServer(), FakeServer()]
    run_with(servers, generate_many(20))
    assert [sum(len(body["rid"]) for body in server.bodies) for server in servers] == [10, 10]


def test_a_sticky_key_keeps_a_group_on_one_server():
    servers = [FakeServer(), FakeServer()]

    async def scenario(client, urls):
        calls = [client.generate(request_of(f"{group}-{i}"), sticky_key=group) for group in range(4) for i in range(5)]
        await asyncio.gather(*calls)

    run_with(servers, scenario)
    groups = [{rid.split("-")[0] for body in server.bodies for rid in body["rid"]} for server in servers]
    assert groups[0].isdisjoint(groups[1])
    assert len(groups[0]) == len(groups[1]) == 2


def test_rejected_sample_does_not_fail_its_batch():
    async def refuse_long(body):
        if any(len(ids) > 3 for ids in body["input_ids"]):
            return web.json_response({"error": {"message": "Input length exceeds"}}, status=400)

    async def scenario(client, urls):
        requests = [request_of("a"), request_of("long", (1,) * 5), request_of("c")]
        return await asyncio.gather(*[client.generate(r) for r in requests], return_exceptions=True)

    first, refused, third = run_with([FakeServer(refuse_long)], scenario)
    assert isinstance(refused, RequestRejected) and "Input length exceeds" in str(refused)
    assert first.token_ids == third.token_ids == (7,)


def test_rejected_request_is_not_retried_but_counted():
    async def refuse(body):
        return web.json_response({"error": {"message": "no"}}, status=400)

    server = FakeServer(refuse)

    async def scenario(client, urls):
        with pytest.raises(RequestRejected, match="'r'"):
            await client.generate(request_of())
        return client.num_refused

    assert run_with([server], scenario) == len(server.bodies) == 1


def test_a_request_that_would_run_the_model_without_its_adapters_is_counted_and_never_sent():
    server = FakeServer()

    async def scenario(client, urls):
        client.needs_adapter = True
        await client.generate(request_of("adapted", adapter="policy-3"))
        with pytest.raises(RequestRejected, match="names no adapter"):
            await client.generate(request_of("plain"))
        return client.num_refused

    assert run_with([server], scenario) == 1 and len(server.bodies) == 1


def test_a_server_error_is_retried_under_a_new_request_id():
    server = FakeServer()

    async def fail_once(body):
        return web.Response(status=500) if len(server.bodies) == 1 else None

    server.handler = fail_once
    (generation,) = run_with([server], generate_many(1))
    assert generation.token_ids == (1,)
    assert [body["rid"] for body in server.bodies] == [["r0;"], ["r0#1;"]]


def test_a_lost_server_fails_over_and_is_reported_once():
    async def break_connection(body):
        broken.healthy, broken.probe_s = False, None
        raise ConnectionResetError

    broken, good = FakeServer(break_connection), FakeServer()
    lost: list[str] = []

    async def scenario(client, urls):
        generations = await generate_many(20)(client, urls)
        assert client.live_urls == [urls[1]]
        assert lost == [urls[0]]
        await generate_many(4)(client, urls)
        return generations

    generations = run_with([broken, good], scenario, on_server_lost=lambda url, reason: lost.append(url))
    assert [generation.token_ids for generation in generations] == [(i + 1,) for i in range(20)]
    assert len(broken.bodies) == 1


def test_server_lost_error_names_the_server_until_it_is_restored():
    async def scenario(client, urls):
        await server.stop()
        with pytest.raises(ServerLost, match="restore") as caught:
            await client.generate(request_of())
        assert caught.value.url == urls[0] and caught.value.num_attempts == 1
        with pytest.raises(ServerLost, match="not restored"):
            await client.generate(request_of())
        client.restore(urls[0])
        assert client.live_urls == urls

    server = FakeServer()
    run_with([server], scenario)


async def hang(body: dict[str, Any]) -> None:
    await asyncio.sleep(30)


def test_requests_that_time_out_fail_after_the_retries():
    server = FakeServer(hang)

    async def scenario(client, urls):
        with pytest.raises(ServerLost, match="no answer within") as caught:
            await client.generate(request_of())
        assert caught.value.num_attempts == 3 and client.live_urls == urls

    run_with([server], scenario, request_timeout_s=0.05, max_retries=2)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(("scheduler_works", "num_running"), [(False, 3), (True, 0)])
def test_hung_server_with_a_healthy_page_is_lost_and_requests_move(
    scheduler_works, num_running
):
    stuck, good = FakeServer(hang), FakeServer()
    stuck.probe_s, stuck.scheduler_works, stuck.num_running = 30.0, scheduler_works, num_running
    lost: list[str] = []

    async def scenario(client, urls):
        started_at = time.monotonic()
        generations = await generate_many(20)(client, urls)
        assert time.monotonic() - started_at < 5.0  # far below request_timeout_s
        assert client.live_urls == [urls[1]] and lost == [urls[0]]
        return generations

    options = {"hang_timeout_s": 0.6, "on_server_lost": lambda url, reason: lost.append(url)}
    generations = run_with([stuck, good], scenario, **options)
    assert [generation.token_ids for generation in generations] == [(i + 1,) for i in range(20)]


@pytest.mark.parametrize("progress", ["a token", "requests in progress", "answers"])
def test_busy_server_is_not_hung(progress):
    async def slow(body):
        await asyncio.sleep(1.5 if body["rid"] == ["first;"] else 0.1)

    server = FakeServer(slow)
    server.probe_s = 0.0 if progress == "a token" else 30.0
    server.num_running = 1 if progress == "requests in progress" else 0

    async def scenario(client, urls):
        first = asyncio.ensure_future(client.generate(request_of("first")))
        while not first.done():
            if progress == "answers":
                await client.generate(request_of(f"r{len(server.bodies)}"))
            await asyncio.sleep(0.01)
        assert client.live_urls == urls
        return await first

    assert run_with([server], scenario, hang_timeout_s=0.8, max_batch_size=1).token_ids == (7,)
    assert len([body for body in server.bodies if body["rid"] == ["first;"]]) == 1


@pytest.mark.parametrize("num_servers", [1, 2])
def test_invalid_replies_are_retried_elsewhere_and_the_last_is_reported(num_servers):
    async def lie(body):
        return web.json_response([{"output_ids": "no"} for _ in body["rid"]])

    async def page(body):
        return web.Response(text="<html>gateway</html>")

    liars = [FakeServer(lie), FakeServer(page)][:num_servers]
    good = FakeServer()

    async def scenario(client, urls):
        assert (await client.generate(request_of())).token_ids == (7,)
        for server in (*liars, good):
            server.handler = lie
        with pytest.raises(InvalidReply, match=r"http://127.0.0.1:\d+ sent an invalid reply: meta_info: expected a JSON object"):
            await client.generate(request_of("second"))

    run_with([*liars, good], scenario, max_retries=num_servers)


def test_only_invalid_replies_not_nan_weights_mark_a_server_as_lost():
    async def page(body):
        return web.Response(text="<html>gateway</html>")

    async def nan(body):
        return web.json_response([answer_of(rid, [1]) | {"meta_info": NAN_META} for rid in body["rid"]])

    lost: list[tuple[str, str]] = []

    async def scenario(client, urls):
        assert len(await generate_many(40)(client, urls)) == 40
        assert [url for url, _ in lost] == [urls[0]] and "3 consecutive invalid replies" in lost[0][1] and "<html>" in lost[0][1]
        servers[1].handler = nan
        with pytest.raises(InvalidReply, match="not finite"):
            await client.generate(request_of("second"))
        assert client.live_urls == [urls[1]]

    servers = [FakeServer(page), FakeServer()]
    run_with(servers, scenario, max_batch_size=1, on_server_lost=lambda url, reason: lost.append((url, reason)))


NAN_META = {"finish_reason": {"type": "length"}, "weight_version": "7", "output_token_logprobs": [[None, 1, None]]}


def test_stale_weight_version_is_retried_on_another_server():
    other, good = FakeServer(), FakeServer()

    async def old(body):
        answers = [answer_of(rid, [1]) for rid in body["rid"]]
        for answer in answers:
            answer["meta_info"]["weight_version"] = "default"
        return web.json_response(answers)

    async def scenario(client, urls):
        answers = [await client.generate(request_of(f"r{i}", weight_version="7")) for i in range(6)]
        assert {answer.weight_version for answer in answers} == {"7"}
        other.handler = good.handler = old
        with pytest.raises(InvalidReply, match="version 'default', but version 7 was published"):
            await client.generate(request_of("stale", weight_version="7"))

    other.handler = old
    run_with([other, good], scenario, max_retries=1)


@pytest.mark.parametrize("status", [429, 503])
def test_busy_gateway_does_not_count_as_a_failed_attempt(status):
    async def busy(body):
        if len(server.bodies) < 8:
            return web.Response(status=status, headers={"Retry-After": "0"})

    server = FakeServer(busy)
    (generation,) = run_with([server], generate_many(1), max_retries=0)
    assert generation.token_ids == (1,) and len(server.bodies) == 8


def test_gateway_that_stays_busy_fails_at_the_deadline():
    async def busy(body):
        return web.Response(status=503, text="try later")

    async def scenario(client, urls):
        with pytest.raises(ServerLost, match="503: try later"):
            await client.generate(request_of())

    run_with([FakeServer(busy)], scenario, max_retries=0, request_timeout_s=0.3)


@pytest.mark.parametrize(("key", "words"), [("", "it requires an API key"), ("k", "is not the server's")])
def test_rejected_api_key_error_names_the_server_and_the_config_key(key, words):
    async def refuse(body):
        return web.json_response({"error": "Unauthorized"}, status=401)

    server = FakeServer(refuse)

    async def scenario(client, urls):
        with pytest.raises(ApiKeyRejected, match=f"{urls[0]} answered 401: .*{words}.*rollout.api_key_env"):
            await client.generate(request_of())

    run_with([server], scenario, api_key=key)
    assert len(server.bodies) == 1


def test_endless_replies_and_compression_bombs_are_rejected():
    async def endless(body):
        return web.Response(body=b"[" + b" " * (3 << 20))

    async def bomb(body):
        response = web.Response(body=b"[" + b" " * (64 << 20))
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async def scenario(client, urls):
        with pytest.raises(InvalidReply, match="longer than 10"):
            await client.generate(request_of())

    for handler in (endless, bomb):
        run_with([FakeServer(handler)], scenario, max_retries=1)


def test_a_redirect_is_not_followed():
    target = FakeServer()

    async def scenario(client, urls):
        async def redirect(body):
            return web.Response(status=302, headers={"Location": urls[1] + "/generate"})

        servers[0].handler = redirect
        client.drop(urls[1])
        with pytest.raises(ServerLost, match="302"):
            await client.generate(request_of())

    servers = [FakeServer(), target]
    run_with(servers, scenario, max_retries=1)
    assert target.bodies == []


def test_aborted_request_that_was_never_sent_returns_empty():
    release = asyncio.Event()

    async def wait(body):
        await release.wait()

    server = FakeServer(wait)

    async def scenario(client, urls):
        calls = [asyncio.ensure_future(client.generate(request_of(f"r{i}"))) for i in range(3)]
        while not server.bodies:
            await asyncio.sleep(0.001)
        await client.abort({"r0", "r1", "r2"})
        release.set()
        return await asyncio.gather(*calls)

    generations = run_with([server], scenario, max_inflight_requests=1)
    assert [generation.finish_reason for generation in generations] == ["length", "abort", "abort"]
    assert len(generations[1].token_ids) == 0
    assert server.controls == ["abort_request"]


def test_closing_the_client_leaves_no_caller_waiting():
    async def hang(body):
        await asyncio.sleep(30)

    server = FakeServer(hang)

    async def scenario(client, urls):
        calls = [asyncio.ensure_future(client.generate(request_of(f"r{i}"))) for i in range(2)]
        while not server.bodies:
            await asyncio.sleep(0.001)
        await client.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2

    run_with([server], scenario, max_inflight_requests=1)


def test_requests_sent_alone_are_not_batched_and_stay_in_order():
    server = FakeServer()

    async def scenario(client: SglangClient, urls: list[str]) -> list[Generation]:
        return await asyncio.gather(
            *[client.generate(request_of(f"r{i}", (i, 1)), alone=i in (2, 3)) for i in range(6)]
        )

    run_with([server], scenario)
    assert [body["rid"] for body in server.bodies] == [["r0;", "r1;"], ["r2;"], ["r3;"], ["r4;", "r5;"]]


def test_long_request_occupies_only_its_own_slot():
    """If the first two requests shared a batch, the third would wait for the slow one."""
    others_done = asyncio.Event()

    async def slow_first(body: dict[str, Any]) -> None:
        if "slow;" in body["rid"]:
            await others_done.wait()

    server = FakeServer(slow_first)

    async def scenario(client: SglangClient, urls: list[str]) -> None:
        requests = [request_of(rid, max_new_tokens=1000) for rid in ("slow", "a", "b", "c", "d")]
        slow, *others = [asyncio.ensure_future(client.generate(request)) for request in requests]
        await asyncio.wait_for(asyncio.gather(*others), 10)
        others_done.set()
        await slow

    run_with([server], scenario, max_inflight_requests=2)
    assert all(len(body["rid"]) == 1 for body in server.bodies) and server.max_inflight == 2


def test_request_timeout_grows_with_its_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_rl.config.derived._ANSWER_S", 0.05)
    monkeypatch.setattr("megatron_rl.config.derived._ANSWER_S_PER_TOKEN", 0.002)

    async def late(body: dict[str, Any]) -> None:
        await asyncio.sleep(0.4)

    async def scenario(client: SglangClient, urls: list[str]) -> None:
        await client.generate(request_of("long", max_new_tokens=1000))
        with pytest.raises(ServerLost, match="no answer within 0 s"):
            await client.generate(request_of("short", max_new_tokens=10))

    run_with([FakeServer(late)], scenario, max_retries=0)


def test_abort_by_id_ends_only_the_given_requests():
    aborted: list[str] = []
    released = asyncio.Event()

    async def hold(body: dict[str, Any]) -> None:
        await released.wait()

    class Server(FakeServer):
        async def _control(self, http_request: web.Request) -> web.Response:
            aborted.append((await http_request.json())["rid"])
            return web.Response()

    server = Server(hold)

    async def scenario(client: SglangClient, urls: list[str]) -> list[Generation]:
        calls = [asyncio.ensure_future(client.generate(request_of(f"r{i}"))) for i in (1, 10, 2, 3)]
        while not server.bodies:
            await asyncio.sleep(0.01)
        calls.append(asyncio.ensure_future(client.generate(request_of("r4"))))
        await asyncio.sleep(0)
        await client.abort({"r1", "r4", "unknown"})
        released.set()
        return await asyncio.gather(*calls)

    answers = run_with([server], scenario, max_inflight_requests=4)
    assert aborted == ["r1;"]
    assert answers[-1].finish_reason == "abort" and len(answers[-1].token_ids) == 0
    assert [body["rid"] for body in server.bodies] == [["r1;", "r10;", "r2;", "r3;"]]


def test_no_request_id_is_a_prefix_of_another():
    """SGLang aborts every request whose id starts with the given one."""
    server = FakeServer()
    failures = iter([500])

    async def fail_once(body: dict[str, Any]) -> web.Response | None:
        status = next(failures, None)
        return web.Response(status=status) if status else None

    server.handler = fail_once
    run_with([server], generate_many(12))
    rids = [rid for body in server.bodies for rid in body["rid"]]
    assert len(rids) == 24
    assert not any(one != other and other.startswith(one) for one in rids for other in rids)


def test_abort_at_a_lost_server_is_ignored():
    server = FakeServer()

    async def scenario(client: SglangClient, urls: list[str]) -> None:
        started = asyncio.Event()

        async def hold(body: dict[str, Any]) -> None:
            started.set()
            await asyncio.sleep(30)

        server.handler = hold
        call = asyncio.ensure_future(client.generate(request_of("r")))
        await started.wait()
        await server.stop()
        await client.abort({"r"})
        with pytest.raises(ServerLost):
            await call

    run_with([server], scenario, max_retries=0)


def test_hot_tokens_and_stop_strings_use_sglangs_parameters():
    hot = request_of("hot", top_k=4, banned_token_ids=(7, 8), logprobs_after_top_k=True)
    plain = request_of("plain", stop_strings=("</calc>",))
    body = generate_body([hot, plain], ["a", "b"])
    assert body["return_sampling_mask"] == [True, False]
    assert body["sampling_params"][0]["logit_bias"] == {"7": -1e9, "8": -1e9}
    assert body["sampling_params"][1]["stop"] == ["</calc>"]
    assert "return_sampling_mask" not in generate_body([plain], ["b"])
    assert not {"stop", "logit_bias"} & set(generate_body([request_of()], ["c"])["sampling_params"][0])


def test_log_probs_after_top_k_and_the_matched_text_are_read():
    answer = answer_of("r", [3])
    answer["meta_info"]["output_token_sampling_logprobs"] = [-0.25]
    hot = request_of(top_k=4, logprobs_after_top_k=True)
    assert parse_generation(hot, answer).logprobs == (-0.25,)
    assert parse_generation(request_of(), answer).logprobs == (-0.5,)
    by_text = answer_of("r", [3], {"type": "stop", "matched": "</calc>"})
    by_token = answer_of("r", [3], {"type": "stop", "matched": 3})
    assert parse_generation(request_of(stop_strings=("</calc>",)), by_text).stop_string == "</calc>"
    assert parse_generation(request_of(), by_token).stop_string == ""


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"banned_token_ids": (1, VOCAB_SIZE)}, "banned_token_ids"),
        ({"logprobs_after_top_k": True}, "top_k=-1"),
        ({"logprobs_after_top_k": True, "top_k": 5000}, "4096"),
    ],
)
def test_client_rejects_requests_that_the_server_would_reject(changes, names):
    with pytest.raises(RequestRejected, match=names):
        validate(request_of(**changes), VOCAB_SIZE)


def test_server_that_aborts_without_a_token_is_lost_instead_of_asked_forever():
    async def abort(body):
        meta = {"finish_reason": {"type": "abort"}, "weight_version": "7"}
        return web.json_response([{"output_ids": [], "meta_info": meta | {"id": rid}} for rid in body["rid"]])

    async def scenario(client, urls):
        with pytest.raises(ServerLost, match="it aborted request 'r' without a token, although no abort was sent"):
            await client.generate(request_of())
        assert client.live_urls == []

    server = FakeServer(abort)
    run_with([server], scenario)
    assert len(server.bodies) == 3


def test_retry_after_of_years_is_not_waited_for():
    async def busy(body):
        return web.Response(status=503, headers={"Retry-After": "99999999"})

    async def scenario(client, urls):
        with pytest.raises(ServerLost, match="answered 503"):
            await client.generate(request_of())

    run_with([FakeServer(busy)], scenario, max_retries=1, request_timeout_s=0.2)


def test_server_that_reports_progress_but_never_replies_has_a_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_rl.config.derived._ANSWER_S", 0.1)
    monkeypatch.setattr("megatron_rl.rollout.sglang.balance.client._MAX_UNANSWERED", 3.0)

    class NeverDone(FakeServer):
        async def _loads(self, http_request: web.Request) -> web.Response:
            self.num_running += 1
            return web.json_response({"loads": [{"num_running_reqs": self.num_running, "max_total_num_tokens": 1000}]})

    async def silence(body: dict[str, Any]) -> None:
        await asyncio.sleep(30)

    async def scenario(client: SglangClient, urls: list[str]) -> None:
        with pytest.raises(ServerLost, match="no answer within"):
            await client.generate(request_of())

    server = NeverDone(silence)
    run_with([server], scenario, max_retries=1, request_timeout_s=0.1)
    assert len(server.bodies) == 2 and server.num_running > 4
