"""Laws of the choice of a server, against brute force, and against stub servers whose KV caches have a size."""

import asyncio
import random
import statistics
from collections import defaultdict
from dataclasses import replace

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.requests import Generation, GenerationRequest, ServerLost
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.balance.load_balancing import (
    OutputLengthEstimate,
    PendingRequest,
    PrefixAffinity,
    ServerQueue,
    affinity_keys,
    choose,
)
from tests.unit.rollout.sglang.balance.kv_server import KvServer, length_of
from tests.unit.rollout.sglang.balance.test_client import FakeServer, request_of, run_with

MOST_NEW = 200
SHORT_LIMIT_S = 0.15


def pending_of(request: GenerationRequest, tokens: int) -> PendingRequest:
    return PendingRequest(request, request.rid, None, tokens=tokens, names=affinity_keys(request, None), group=request.group_name or None)


def placed(requests: list[GenerationRequest], num_servers: int) -> list[ServerQueue]:
    """Assign all requests to servers before any reply."""
    servers, homes = [ServerQueue(f"s{i}") for i in range(num_servers)], PrefixAffinity()
    for request in requests:
        pending = pending_of(request, request.num_prompt_tokens + request.max_new_tokens)
        choose(servers, pending, homes).push(pending)
        homes.note(pending)
    return servers


def slots_of(seed: int, num_groups: int, size: int = 16) -> list[GenerationRequest]:
    """A window of groups: fresh responses, and unfinished responses with long-tailed contexts."""
    draw = random.Random(seed)
    requests = []
    for group in range(num_groups):
        prompt = (group % 100,) * draw.randint(20, 120)
        for i in range(size):
            carried = draw.random() < 0.35
            own = (i,) * min(800, int(165 * draw.lognormvariate(0, 0.9))) if carried else ()
            request = request_of(f"{seed}-{group}-{i}", prompt + own, max_new_tokens=MOST_NEW, weight_version="7")
            requests.append(replace(request, response_name=request.rid, group_name="" if carried else f"{seed}-{group}"))
    return requests


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 8))
def test_fresh_groups_stay_whole_and_loads_stay_balanced(seed, num_groups, num_servers):
    requests = slots_of(seed, num_groups)
    servers = placed(requests, num_servers)
    assert sum(len(server.waiting) for server in servers) == len(requests)
    homes_of_group = defaultdict(set)
    for server in servers:
        for pending in server.waiting:
            homes_of_group[pending.group].add(server.url)
    del homes_of_group[None]
    assert all(len(urls) == 1 for urls in homes_of_group.values())
    loads = [server.load for server in servers]
    largest = max(r.num_prompt_tokens + r.max_new_tokens for r in requests)
    freshest = max((r.num_prompt_tokens + r.max_new_tokens for r in requests if r.group_name), default=0)
    assert max(loads) - min(loads) <= 0.1 * min(loads) + 16 * freshest + largest


def test_balancing_by_tokens_beats_balancing_by_requests():
    """Heavy tails: load of the fullest server over the mean, by tokens with whole groups and by request count."""
    by_tokens, by_count = [], []
    for seed in range(8):
        requests = slots_of(seed, num_groups=64)
        loads = [server.load for server in placed(requests, 4)]
        counted = [sum(r.num_prompt_tokens + r.max_new_tokens for r in requests[i::4]) for i in range(4)]
        by_tokens.append(max(loads) / statistics.mean(loads))
        by_count.append(max(counted) / statistics.mean(counted))
    assert statistics.mean(by_tokens) < 1 + (statistics.mean(by_count) - 1) * 0.8


def test_response_returns_to_its_server_unless_overloaded():
    servers, homes = [ServerQueue("a"), ServerQueue("b")], PrefixAffinity()
    first = pending_of(replace(request_of(), response_name="r", weight_version="1"), 100)
    choose(servers, first, homes).push(first)
    homes.note(first)
    servers[0].pop()
    for version, most in (("1", 1600), ("2", 200)):  # new weights empty the prefix caches
        again = pending_of(replace(request_of(), response_name="r", weight_version=version), 100)
        for held, url in ((most, "a"), (most + 1, "b")):
            servers[0].held = held
            assert choose(servers, again, homes).url == url
    servers[0].held, servers[1].held = 11_000, 10_000
    assert choose(servers, again, homes).url == "a"


def test_server_with_twice_the_kv_cache_gets_twice_the_tokens():
    servers, homes = [ServerQueue("small", capacity=1000), ServerQueue("large", capacity=2000)], PrefixAffinity()
    for i in range(30):
        pending = pending_of(request_of(f"r{i}"), 10)
        choose(servers, pending, homes).push(pending)
    assert [server.load for server in servers] == [100, 200]


@settings(deadline=None)
@given(st.lists(st.integers(1, MOST_NEW), min_size=1, max_size=60), st.randoms())
def test_requests_in_progress_count_with_their_full_limit(lengths, draw):
    sizes = OutputLengthEstimate()
    assert sizes.expected(MOST_NEW) == MOST_NEW
    for i in range(len(lengths)):
        sizes.sent(str(i), MOST_NEW)
    counted = [MOST_NEW] * len(lengths)
    for i in draw.sample(range(len(lengths)), len(lengths)):
        counted[i] = lengths[i]
        sizes.ended(str(i), MOST_NEW, Generation((1,) * lengths[i], (-1.0,) * lengths[i], "stop", "7", 0))
        assert statistics.mean(counted) <= sizes.expected(MOST_NEW) < statistics.mean(counted) + 1 + 1e-6
    sizes.sent("cut", MOST_NEW)
    sizes.ended("cut", MOST_NEW, Generation((1,), (-1.0,), "abort", "7", 0))
    assert statistics.mean(counted) <= sizes.expected(MOST_NEW) < statistics.mean(counted) + 1 + 1e-6


@pytest.mark.parametrize("says_so", [True, False])
def test_no_request_is_retracted_if_the_server_reports_its_kv_cache(says_so):
    servers = [KvServer(4000, says_so=says_so, step_tokens=4) for _ in range(2)]
    requests = slots_of(5, num_groups=6)

    async def scenario(client: SglangClient, urls: list[str]) -> list[Generation]:
        return await asyncio.gather(*[client.generate(request) for request in requests])

    answers = run_with(servers, scenario)
    assert [len(answer.token_ids) for answer in answers] == [length_of(request.rid, MOST_NEW) for request in requests]
    retractions = sum(server.num_retractions for server in servers)
    assert (retractions == 0) == says_so


def test_idle_server_takes_requests_that_wait_for_a_full_one():
    release = asyncio.Event()

    async def slow(body):
        await release.wait()

    servers = [FakeServer(slow), FakeServer()]

    async def scenario(client: SglangClient, urls: list[str]) -> None:
        requests = [request_of(f"r{i}", max_new_tokens=1000) for i in range(12)]
        calls = [asyncio.ensure_future(client.generate(request)) for request in requests]
        for _ in range(2000):
            if sum(call.done() for call in calls) == 10:
                break
            await asyncio.sleep(0.005)
        release.set()
        await asyncio.gather(*calls)

    run_with(servers, scenario, max_inflight_requests=2)
    assert [len(server.bodies) for server in servers] == [2, 10]


@pytest.mark.parametrize("goes_on", [True, False])
def test_long_window_is_awaited_while_it_makes_progress(goes_on):
    """The window takes ten timeouts; a server without progress fails within two."""
    server = KvServer(10**6, step_tokens=4)

    async def scenario(client: SglangClient, urls: list[str]) -> float:
        started_s = asyncio.get_running_loop().time()
        if goes_on:
            await client.generate(request_of("long", max_new_tokens=10_000))
        else:
            with pytest.raises(ServerLost, match="no progress"):
                await client.generate(request_of("long", max_new_tokens=10_000))
        return asyncio.get_running_loop().time() - started_s

    async def stuck(body: dict) -> web.Response | None:
        server._running["other"] = [1, 1, 1]  # the server reports a running request
        await asyncio.sleep(30)

    if not goes_on:
        server.handler = stuck
    took_s = run_with([server], scenario, request_timeout_s=SHORT_LIMIT_S, max_retries=0)
    assert took_s > (5 if goes_on else 1) * SHORT_LIMIT_S
    assert len(server.bodies) == 1


def test_request_forgotten_by_its_server_is_resent():
    server = KvServer(10**6)

    async def forget_once(body: dict) -> web.Response | None:
        if len(server.bodies) == 1:
            await asyncio.sleep(30)
        return await server._grow(body)

    server.handler = forget_once

    async def scenario(client: SglangClient, urls: list[str]) -> Generation:
        return await client.generate(request_of("r", max_new_tokens=200))

    assert run_with([server], scenario, request_timeout_s=SHORT_LIMIT_S).finish_reason == "length"
    assert len(server.bodies) == 2
