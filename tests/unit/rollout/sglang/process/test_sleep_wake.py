"""Laws of sleep: only idle servers go to sleep, only sleeping servers are woken, and a restarted server is awake."""

import pytest
from aiohttp import web

from megatron_rl.rollout.sglang.process.cleanup import KV_CACHE, WEIGHTS, ServerMemory
from megatron_rl.weights.bucket_plan import ServerAddress
from megatron_rl.weights.server_calls import ServerCallError
from tests.unit.local_service import local_service


def calls(service) -> list[tuple[str, list[str]]]:
    """(path, tags) of the calls since the last time, without idle polls."""
    asked = [
        (path.strip("/").partition("_")[0], sorted(body.get("tags", [])))
        for path, body in service.requests
        if path != "/flush_cache"
    ]
    service.requests.clear()
    return asked


def test_each_memory_tag_is_released_and_resumed_once():
    everything = sorted([*WEIGHTS, *KV_CACHE])
    with local_service(lambda path, body: {}) as service:
        server, memory = [ServerAddress(service.url, 1, 1)], ServerMemory(5.0)
        memory.wake(server, WEIGHTS)
        assert calls(service) == []  # it never slept
        memory.sleep(server)
        memory.sleep(server)
        assert calls(service) == [("release", everything)]
        memory.wake(server, WEIGHTS)
        memory.wake(server, WEIGHTS)
        memory.wake(server, KV_CACHE)
        assert calls(service) == [("resume", sorted(WEIGHTS)), ("resume", sorted(KV_CACHE))]
        memory.sleep(server)
        assert calls(service) == [("release", everything)]
        restarted = [server[0]._replace(incarnation=2)]
        memory.wake(restarted, WEIGHTS)
        assert calls(service) == []
        memory.sleep(restarted)
        assert calls(service) == [("release", everything)]


def test_sleep_polls_a_busy_server_until_it_is_idle():
    refusals = [True, True]

    def answer(path, body):
        if path == "/flush_cache" and refusals:
            refusals.pop()
            return web.json_response({}, status=400)
        return {}

    with local_service(answer) as service:
        ServerMemory(5.0).sleep([ServerAddress(service.url, 1, 1)])
        assert [path for path, _ in service.requests] == ["/flush_cache"] * 3 + ["/release_memory_occupation"]


def test_server_that_never_becomes_idle_is_reported_and_stays_awake():
    with local_service(lambda path, body: web.json_response({}, status=400)) as service:
        with pytest.raises(ServerCallError, match=f"waited 0.2 s for {service.url} to become idle"):
            ServerMemory(0.2).sleep([ServerAddress(service.url, 1, 1)])
        assert {path for path, _ in service.requests} == {"/flush_cache"}
