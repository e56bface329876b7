"""Remote workers give the same replies and keep the routes on their node, also if processes are killed.

The node is a process of this machine that has started what the first rank of a node starts.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import psutil
import pybase64
import pytest
from aiohttp import web

from megatron_rl.parallel.array_server import read_arrays
from megatron_rl.rollout.requests import BatchCall, Generation, RouteShape
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.workers.remote_calls import NodeLost, Relay, RemoteCall, RemoteWorkerInfo
from megatron_rl.rollout.workers.worker_pool import WorkerPool
from megatron_rl.system.files.shared_file import NODE, address_of
from megatron_rl.system.http.json_http import ApiKey, NoHttpReply
from tests.unit.rollout.sglang.balance.test_client import VOCAB_SIZE, FakeServer, answer_of, request_of
from tests.unit.rollout.workers.test_worker_pool import Gate, until

WAIT_S = 240
SHAPE = RouteShape(num_layers=3, top_k=2, num_experts=8)
_NODE = """
import pickle, sys
from megatron_rl.rollout.workers import remote_workers as node_workers
found = node_workers._started(1)
assert node_workers._started(1) is found  # a run that rolls back starts them again
sys.stdout.buffer.write(pickle.dumps(found).hex().encode() + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


class Node:
    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", _NODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.found = pickle.loads(bytes.fromhex(self.process.stdout.readline().decode()))
        ((port, self.fd),) = self.found.listeners
        self.worker = RemoteWorkerInfo(self.found.host, port, self.found.secret, NODE + self.found.pid, self.fd)

    @property
    def worker_pid(self) -> int:
        names = {child.pid: child.cmdline() for child in psutil.Process(self.process.pid).children()}
        (pid,) = [pid for pid, words in names.items() if "listen" in words]
        return pid

    def bytes_held(self) -> int:
        return os.stat(f"/proc/{self.process.pid}/fd/{self.fd}").st_blocks * 512


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node()
    yield node
    children = psutil.Process(node.process.pid).children()
    node.process.kill()
    node.process.wait()
    assert psutil.wait_procs(children, timeout=30)[1] == [], "they end with the rank"


def routes_of(num_tokens: int, first: int) -> np.ndarray:
    """[tokens, layers, k] as a server reports them; different for each prompt."""
    rows = np.arange(num_tokens * SHAPE.num_layers, dtype=np.int32).reshape(-1, 1) + first
    return np.concatenate([rows % 8, (rows + 3) % 8], 1).reshape(num_tokens, SHAPE.num_layers, SHAPE.top_k)


async def with_routes(body: dict[str, Any]) -> web.Response:
    answers = [answer_of(*pair) for pair in zip(body["rid"], body["input_ids"], strict=True)]
    for answer, ids in zip(answers, body["input_ids"], strict=True):
        answer["meta_info"]["routed_experts"] = pybase64.b64encode(routes_of(len(ids), ids[0]).tobytes()).decode()
    return web.json_response(answers)


def run_with(
    node: Node | None, scenario: Callable[..., Awaitable[Any]], handler: Any = with_routes, worker: RemoteWorkerInfo | None = None
) -> Any:
    """``scenario(client, warnings)`` with two servers, one worker here and one on the node."""

    async def main() -> Any:
        servers, warnings = [FakeServer(handler) for _ in range(2)], list[str]()
        try:
            async with SglangClient([await one.start() for one in servers], vocab_size=VOCAB_SIZE) as client:
                client.first_pause_s = 0.01
                far = [worker or node.worker] if node is not None else []
                client.caller = WorkerPool(1, warnings.append, far)
                return await asyncio.wait_for(scenario(client, warnings), WAIT_S)
        finally:
            for one in servers:
                await one.stop()

    return asyncio.run(main())


def long_request(index: int) -> Any:
    # Long enough not to be batched, so that the servers get alternate requests.
    return request_of(f"r{index}", (index, 1), max_new_tokens=500, routes=SHAPE)


async def ask_many(client: SglangClient, number: int = 40) -> list[Generation]:
    return await asyncio.gather(*[client.generate(long_request(i)) for i in range(number)])


def is_far(answer: Generation) -> bool:
    address = address_of(answer.routes)
    assert address is not None
    return address.pid >= NODE


def fetched(node: Node, answer: Generation) -> np.ndarray:
    address = address_of(answer.routes)
    assert address is not None and answer.routes is not None
    pieces = list(read_arrays(np.array([address]), node.found.service))
    return np.concatenate(pieces).view(answer.routes.dtype).reshape(answer.routes.shape)


def test_remote_worker_gives_the_same_replies_and_keeps_the_routes(node: Node) -> None:
    async def scenario(client: SglangClient, warnings: list[str], has_node: bool = True) -> list[Generation]:
        answers = await ask_many(client)
        if has_node:
            assert {is_far(answer) for answer in answers} == {True, False}
            for index, answer in enumerate(answers):
                said = routes_of(2, index) + 1
                found = fetched(node, answer) if is_far(answer) else answer.routes
                np.testing.assert_array_equal(found, said)
                assert answer.routes is not None and answer.routes.dtype == np.uint8 and len(answer.routes[:1]) == 1
        assert not warnings
        return [(list(a.token_ids), list(a.logprobs), a.routes.shape) for a in answers]  # type: ignore[union-attr, misc]

    assert run_with(node, scenario) == run_with(None, partial(scenario, has_node=False))


def test_unreferenced_routes_are_freed_on_the_remote_node(node: Node) -> None:
    async def ask(client: SglangClient) -> list[Generation]:
        # Each has routes on pages of its own.
        requests = [request_of(f"r{i}", (i, *[1] * 999), max_new_tokens=500, routes=SHAPE) for i in range(40)]
        return await asyncio.gather(*map(client.generate, requests))

    async def scenario(client: SglangClient, warnings: list[str]) -> None:
        before = node.bytes_held()
        kept = (await ask(client))[:2]
        held = node.bytes_held() - before
        for _ in range(3):
            gc.collect()
            await ask(client)
        assert 0 < node.bytes_held() - before <= 1.5 * held  # four times as much if nothing were freed
        for index, answer in enumerate(kept):
            if is_far(answer):
                np.testing.assert_array_equal(fetched(node, answer), routes_of(1000, index) + 1)

    run_with(node, scenario)


def test_killed_remote_worker_loses_no_call_and_no_stored_routes(node: Node) -> None:
    """Calls in progress are resent, and stored routes stay readable."""
    gate = Gate()

    async def handler(body: dict[str, Any]) -> web.Response:
        if body["input_ids"][0][0] >= 50:
            await gate(body)
        return await with_routes(body)

    async def scenario(client: SglangClient, warnings: list[str]) -> None:
        before = await ask_many(client, 8)
        tasks = [asyncio.create_task(client.generate(long_request(i))) for i in range(50, 58)]
        await until(gate.has_seen, 8)
        pid = node.worker_pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(warnings) == 1)
        await until(lambda: len(gate.seen) >= 12)
        gate.open.set()
        answers = await asyncio.gather(*tasks)
        assert [list(answer.token_ids) for answer in answers] == [[i + 1] for i in range(50, 58)]
        assert node.worker_pid != pid and "is restarted" in warnings[0] and len(warnings) == 1
        assert any(map(is_far, answers)) and len(set(gate.seen)) == len(gate.seen), "a server rejects a duplicate id"
        for first, found in [(0, before), (50, answers)]:
            for index, answer in enumerate(found, first):
                routes = fetched(node, answer) if is_far(answer) else answer.routes
                np.testing.assert_array_equal(routes, routes_of(2, index) + 1)

    run_with(node, scenario, handler)


def test_blocked_remote_worker_raises_node_lost(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is larger than the connection's buffers, so that the sender is blocked too."""
    monkeypatch.setattr("megatron_rl.rollout.workers.remote_calls.SILENCE_S", 30.0)

    async def scenario() -> None:
        relay = Relay(node.worker, 1)
        requests = [request_of(f"r{i}", (1,) * 400_000, max_new_tokens=500) for i in range(8)]
        batch = BatchCall("http://127.0.0.1:9", requests, [one.rid for one in requests], 60.0, VOCAB_SIZE, ApiKey(""))
        call = RemoteCall(node.worker, 1, batch, [])
        with pytest.raises(NoHttpReply):  # of the server
            await relay.call(call)
        os.kill(node.worker_pid, signal.SIGSTOP)
        # Only now, because a busy machine may take longer for the first call.
        monkeypatch.setattr("megatron_rl.rollout.workers.remote_calls.SILENCE_S", 1.0)
        try:
            with pytest.raises(NodeLost, match="did nothing for 1 s"):
                await asyncio.wait_for(relay.call(call), WAIT_S)
        finally:
            os.kill(node.worker_pid, signal.SIGCONT)
        await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(scenario())


def test_unreachable_remote_worker_is_replaced_and_needs_the_secret(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        closed = node.worker._replace(port=nobody.getsockname()[1])

    async def scenario(client: SglangClient, warnings: list[str]) -> None:
        answers = await ask_many(client)
        assert not any(map(is_far, answers)) and len(warnings) == 1
        assert "node 1" in warnings[0] and "the driver's machine" in warnings[0]

    run_with(node, scenario, worker=closed)
    with socket.create_connection((node.worker.host, node.worker.port)) as stranger:
        stranger.sendall(b"x" * 32 + b"a pickle that nobody reads" * 10)
        stranger.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_loopback_server_is_called_from_its_own_machine(node: Node) -> None:
    async def scenario(client: SglangClient, warnings: list[str]) -> None:
        assert not any(map(is_far, await ask_many(client))) and not warnings

    run_with(node, scenario, worker=node.worker._replace(host="10.255.255.1"))
