"""Laws of calls to servers: accepted replies, API keys, and the time to close connections."""

import asyncio
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import torch
from aiohttp import web

from megatron_rl.config.derived import WeightMethod
from megatron_rl.system.http.json_http import ApiKey
from megatron_rl.weights.bucket_plan import GroupSpec, ServerAddress
from megatron_rl.weights.publish import Connections, WeightPublisher, WeightSyncError
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls
from megatron_rl.weights.source_ranks import SyncGroup
from tests.unit.local_service import Sleep, local_service

WEIGHTS = {"embed": torch.arange(12, dtype=torch.float32).view(3, 4)}
PAGE = b"<html><body>502 Bad Gateway</body></html>"


@pytest.mark.parametrize(
    "bad",
    [
        web.json_response({"success": False, "message": "no"}),
        web.json_response([1]),
        web.json_response({"success": "yes"}),
        web.Response(body=PAGE),
        web.Response(body=b'{"success": tr'),
        web.Response(body=b"[" * 100_000),
        web.Response(status=302, headers={"Location": "/model_info"}),
        web.Response(status=204),
        web.Response(status=503),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", ["/update_weights_from_disk", "/model_info"])
def test_publish_accepts_only_valid_server_replies(tmp_path, at, bad):
    """A gateway's page with status 200 must not count as a successful transfer."""
    content, status, headers = bad.body, bad.status, dict(bad.headers)

    def answer(path, body):
        if path == at:
            return web.Response(body=content, status=status, headers=headers)
        return {"weight_version": "3", "success": True}

    with local_service(answer) as service:
        publisher = WeightPublisher(64, 5.0, method=WeightMethod.disk, folder=tmp_path)
        with pytest.raises(WeightSyncError, match=f"{service.url} replied to (POST|GET) {at}"):
            publisher.publish(WEIGHTS.items(), [(service.url, 1, 1)], 3)


@pytest.mark.parametrize("version", [None, 3, "2", ["3"]])
def test_publish_fails_if_a_server_reports_another_version(tmp_path, version):
    with local_service(lambda path, body: {"weight_version": version, "success": True}) as service:
        publisher = WeightPublisher(64, 5.0, method=WeightMethod.disk, folder=tmp_path)
        with pytest.raises(WeightSyncError, match="weight.version"):
            publisher.publish(WEIGHTS.items(), [(service.url, 1, 1)], 3)


def test_api_key_is_sent_with_every_call_and_never_shown(tmp_path):
    seen = []
    app_answer = {"weight_version": "3", "success": True}

    async def handle(request):
        seen.append(request.headers.get("Authorization"))
        return web.json_response(app_answer if seen[-1] == "Bearer secret" else {}, status=200 if seen[-1] else 401)

    with running(handle) as url:
        address = ServerAddress(url, 1, 1, api_key=ApiKey("secret"))
        publisher = WeightPublisher(64, 5.0, method=WeightMethod.disk, folder=tmp_path)
        publisher.publish(WEIGHTS.items(), [address], 3)
        assert set(seen) == {"Bearer secret"} and "secret" not in f"{address} {address!r}"
        with pytest.raises(WeightSyncError, match=f"{url} replied to .* with 401: .*rollout.api_key_env"):
            publisher.publish(WEIGHTS.items(), [(url, 1, 1)], 3)


def test_closing_takes_seconds_with_silent_or_dead_servers():
    with local_service(lambda path, body: Sleep(60)) as mute:
        gone = ServerAddress("http://127.0.0.1:9", 1, 1)
        connections = Connections("gloo", 300.0)
        connections._on_servers = {gone: ("a", "b"), ServerAddress(mute.url, 1, 1): ("a", "b")}
        began = time.monotonic()
        with pytest.raises(ServerCallError, match="waited|unreachable"):
            connections.release_servers(0.5, but=())
        assert time.monotonic() - began < 5
        connections._on_servers = {gone: ("a",), ServerAddress(mute.url, 1, 1): ("a",)}
        connections.release_servers(0.5, but={gone.url, mute.url})


def test_group_stores_listen_at_the_address_sent_to_servers():
    spec = GroupSpec("name", (ServerAddress("http://127.0.0.1:9", 1, 1),), "gloo", 5.0)
    group = SyncGroup(spec)
    connections = psutil.Process().net_connections("inet")
    assert {c.laddr.ip for c in connections if c.laddr.port == group.port and c.status == "LISTEN"} == {"127.0.0.1"}
    assert group.join_bodies()[0]["master_address"] == "127.0.0.1"


@contextmanager
def running(handle):
    """A small server whose handler gets the whole request."""
    loop = asyncio.new_event_loop()

    async def start():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_failed_server_gets_no_more_buckets_while_others_continue():
    """Otherwise the server would wait in a broadcast after a failed one."""
    bad = web.json_response({"success": False, "message": "wrong shape"}, status=400)
    content, seen = bad.body, []

    def answer(path, body):
        return web.Response(body=content, status=400) if body["bucket"] == 1 else {"success": True}

    with local_service(answer) as first, local_service(lambda path, body: seen.append(body) or {"success": True}) as second:
        with ServerCalls([ServerAddress(first.url, 1, 1), ServerAddress(second.url, 1, 1)], 10.0) as calls:
            futures = [calls.submit("/update_weights_from_tensor", [{"bucket": i}] * 2) for i in range(4)]
            found = [[future.exception(10) for future in pair] for pair in futures]
        assert [body["bucket"] for _, body in first.requests] == [0, 1]
        assert [body["bucket"] for body in seen] == [0, 1, 2, 3]
    assert [error is None for error, _ in found] == [True, False, False, False]
    assert "wrong shape" in str(found[1][0]) and "no further request" in str(found[2][0])
