"""A whole run against a server that breaks every rule of its protocol: no wait without an end, and an error that names the cause."""

import asyncio
import itertools
import math
import random
import threading
import zlib
from typing import Any

import pytest
from aiohttp import web

from megatron_rl.rollout.sglang.process.liveness import PROBE_RID
from megatron_rl.tracking.metrics_file import read_metrics
from tests.integration.test_train import make_task, run
from tests.tiny_models import EOS_TOKEN_ID

VOCAB_SIZE = 80
OPTIONS = (
    "schedule.mode=tppo",
    "run.num_steps=8",
    "parallel.num_ranks=1",
    "eval.sets={}",
    "rollout.weight_sync=disk",
    "rollout.request_timeout_s=2",
    "rollout.max_restarts=1",
    "rollout.max_logprob_difference=0",
    "tracking.mlflow=false",
)

_gzip = zlib.compressobj(wbits=31)
_MIB_OF_BLANKS = [_gzip.compress(b" " * (1 << 20)) + _gzip.flush(zlib.Z_FULL_FLUSH) for _ in range(2)]
_INFLATED = _MIB_OF_BLANKS[0] + 4095 * _MIB_OF_BLANKS[1]


class HostileServer:
    """Samples uniformly; from weight version ``hostile_from`` a few replies are hostile, from ``aborts_from`` all of them."""

    def __init__(self, model_path: str, *, hostile_from: int, aborts_from: int) -> None:
        self._info = {"model_path": model_path, "device": "cpu", "dtype": "float32", "tp_size": 1, "startup_time": 1.0}
        self._version = "0"
        self._hostile_from, self._aborts_from = hostile_from, aborts_from
        # Two tokens in between: the server has served since it was last lost, and the window needs another call.
        hostile = (self._aborted, self._busy_for_years, self._endless, self._slow, self._foreign)
        hostile += (self._inflated, self._redirected, self._too_long, self._in_another_order, self._cut_off, self._of_later_weights)
        self._plan = iter([kind for one in hostile for kind in (one, self._interrupted)])
        self.calls: list[str] = []
        self._random = random.Random(0)

    async def serve(self, started: "asyncio.Future[str] | Any", stop: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        for path, reply in {"/model_info": self._about, "/server_info": self._about, "/health": self._fine}.items():
            app.router.add_get(path, reply)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/{other}", self._fine)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await stop.wait()
        await runner.cleanup()

    async def _about(self, http_request: web.Request) -> web.Response:
        return web.json_response(self._info | {"weight_version": self._version})

    async def _fine(self, http_request: web.Request) -> web.Response:
        return web.json_response({})

    async def _update(self, http_request: web.Request) -> web.Response:
        self._version = (await http_request.json())["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def _generate(self, http_request: web.Request) -> web.StreamResponse:
        body = await http_request.json()
        if body["rid"][0].startswith(PROBE_RID):
            return web.json_response([{"output_ids": [1]}])
        reply = self._good
        if int(self._version) >= self._aborts_from:
            reply = self._aborted
        elif int(self._version) >= self._hostile_from:
            reply = next(self._plan, self._good)
        self.calls.append(reply.__name__)
        return await reply(http_request, body)

    def _samples(self, body: dict[str, Any], most: int = 1000) -> list[dict[str, Any]]:
        samples = []
        for rid, params in zip(body["rid"], body["sampling_params"], strict=True):
            drawn = [self._random.randrange(VOCAB_SIZE) for _ in range(min(most, params["max_new_tokens"]))]
            ids = [*itertools.takewhile(lambda token: token != EOS_TOKEN_ID, drawn)]
            ids += [EOS_TOKEN_ID] * (len(ids) < len(drawn))
            stop = {"type": "stop", "matched": EOS_TOKEN_ID} if ids[-1] == EOS_TOKEN_ID else {"type": "length"}
            logprobs = [[-math.log(VOCAB_SIZE), token, None] for token in ids]
            meta = {"id": rid, "finish_reason": stop, "weight_version": self._version, "output_token_logprobs": logprobs}
            samples.append({"output_ids": ids, "meta_info": meta})
        return samples

    async def _good(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response(self._samples(body))

    async def _interrupted(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        samples = self._samples(body, most=2)
        for sample in samples:
            if sample["output_ids"][-1] != EOS_TOKEN_ID:
                sample["meta_info"]["finish_reason"] = {"type": "abort"}
        return web.json_response(samples)

    async def _aborted(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        meta = {"finish_reason": {"type": "abort"}, "weight_version": self._version}
        return web.json_response([{"output_ids": [], "meta_info": meta | {"id": rid}} for rid in body["rid"]])

    async def _foreign(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        samples = self._samples(body)
        for sample in samples:
            sample["meta_info"]["id"] = "of-another-client"
        return web.json_response(samples)

    async def _too_long(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        samples = self._samples(body)
        for sample in samples:
            sample["output_ids"] += [1] * 1000
            sample["meta_info"]["output_token_logprobs"] += [[-1.0, 1, None]] * 1000
        return web.json_response(samples)

    async def _in_another_order(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response([*reversed(self._samples(body)), {}])

    async def _of_later_weights(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        samples = self._samples(body)
        for sample in samples:
            sample["meta_info"]["weight_version"] = str(int(self._version) + 1)
        return web.json_response(samples)

    async def _redirected(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=307, headers={"Location": "/generate"})

    async def _cut_off(self, http_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000000"})
        await response.prepare(http_request)
        await response.write(b"[")
        assert http_request.transport is not None
        http_request.transport.abort()
        return response

    async def _inflated(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        """Four gigabytes of blanks in four megabytes."""
        return web.Response(body=_INFLATED, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    async def _busy_for_years(self, http_request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": "99999999"})

    async def _slow(self, http_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """A byte now and then, and never the last one."""
        response = web.StreamResponse()
        await response.prepare(http_request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.2)

    async def _endless(self, http_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http_request)
        while True:
            await response.write(b" " * (1 << 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("hostile"))


def test_run_survives_hostile_replies_and_ends_when_nothing_else_comes(folder):
    server = HostileServer(str(folder / "model"), hostile_from=2, aborts_from=6)
    loop, urls, has_started = asyncio.new_event_loop(), list[str](), threading.Event()
    stop = asyncio.Event()

    def started(url: str) -> None:
        urls.append(url)
        has_started.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(started, stop)))
    thread.start()
    try:
        assert has_started.wait(30)
        output_dir = folder / "run"
        status, output = run(folder, "train", f"run.output_dir={output_dir}", f"rollout.urls=[{urls[0]}]", *OPTIONS)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
    hostile = {"_aborted", "_busy_for_years", "_endless", "_slow", "_foreign", "_inflated", "_redirected", "_too_long"}
    hostile |= {"_in_another_order", "_cut_off", "_of_later_weights"}
    assert hostile <= set(server.calls), output
    # A step is recorded while the next step generates; not every step prints a line.
    assert len(read_metrics(output_dir / "metrics.jsonl")) >= 2, output
    assert status != 0 and "removed SGLang server" in output and "without a token, although no abort was sent" in output
    last_good = max(index for index, name in enumerate(server.calls) if name != "_aborted")
    assert len(server.calls) - last_good < 20, "a server that only aborts is called a few times"
