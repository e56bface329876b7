"""Laws of server recovery: no caller waits forever, and no server serves before it has the current weights."""

import asyncio
import contextlib
import gc
import threading
import time

import pytest
from aiohttp import web

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.rollout.recovering_client import RecoveringClient
from megatron_rl.rollout.requests import ServerError, ServerLost
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply
from tests.unit.rollout.sglang.balance.test_client import FakeServer, request_of


class Restartable:
    """Stands in for a server process; ``restart`` starts ``fake`` again on its port."""

    incarnation = 1
    is_ours = True

    def __init__(self, url, fake, *, fails=False):
        self.url, self.fake, self.fails, self.num_restarts = url, fake, fails, 0

    def restart(self, while_waiting=lambda: None):
        self.num_restarts += 1
        if self.fails:
            raise ServerError("it died again")
        self.fake.healthy, self.fake.probe_s, self.fake.handler = True, 0.0, None


    def abandon(self):
        pass


def run(scenario, num_servers=1, **options):
    """Run ``scenario(client, fakes)`` with servers that reply 500 and are unhealthy until they are restarted."""
    fails, kind, known = options.pop("fails", False), options.pop("kind", Restartable), options.pop("known", [])

    async def broken(body):
        return web.Response(status=500)

    async def main():
        fakes = [FakeServer(broken) for _ in range(num_servers)]
        servers = [kind(await fake.start(), fake, fails=fails) for fake in fakes]
        known.extend(servers)
        for fake in fakes:
            fake.healthy, fake.probe_s = False, None
        warnings = []
        try:
            async with RecoveringClient(
                RolloutConfig(max_retries=1), ServerPool(servers), vocab_size=100, warn=warnings.append, **options
            ) as client:
                return await asyncio.wait_for(scenario(client, fakes), 20), servers, warnings
        finally:
            for fake in fakes:
                await fake.stop()

    return asyncio.run(main())


def test_request_waits_until_a_lost_server_recovers():
    answers, (server,), warnings = run(
        lambda client, fakes: asyncio.gather(*[client.generate(request_of(f"r{i}")) for i in range(3)])
    )
    assert [answer.token_ids for answer in answers] == [(7,)] * 3
    assert server.num_restarts == 1
    assert "is lost" in warnings[0] and "serves again, with the weights of its model folder" in warnings[-1]


def test_restarted_server_serves_only_after_readmission():
    served = []

    async def readmit(url):
        await asyncio.sleep(0.05)
        served.append(url)
        return "weight version 3"

    async def scenario(client, fakes):
        answer = await client.generate(request_of())
        assert served == client.client.live_urls
        return answer, client.num_restarts

    (_, num_restarts), (server,), warnings = run(scenario, readmit=readmit)
    assert served == [server.url] and num_restarts == 1 and warnings[-1].endswith("with weight version 3")


def test_recovery_raises_the_last_error_when_no_server_is_left():
    async def scenario(client, fakes):
        for _ in range(2):
            with pytest.raises(ServerError, match="died again"):
                await client.generate(request_of())

    run(scenario, fails=True)


def test_running_server_that_keeps_failing_is_not_awaited():
    async def scenario(client, fakes):
        fakes[0].healthy = True
        with pytest.raises(ServerLost, match="500"):
            await client.generate(request_of())

    _, (server,), _ = run(scenario)
    assert server.num_restarts == 0


class Attached(Restartable):
    """Attached server: ``restart`` fails immediately unless ``back`` is set."""

    is_ours = False
    back = False

    def restart(self, while_waiting=lambda: None):
        self.num_restarts += 1
        if not self.back:
            time.sleep(0.02)
            raise ServerError("it did not come back")
        self.fake.healthy, self.fake.probe_s, self.fake.handler = True, 0.0, None


def test_removed_server_is_reported_with_the_number_remaining(caplog):
    async def scenario(client, fakes):
        fakes[1].healthy, fakes[1].probe_s, fakes[1].handler = True, 0.0, None
        answers = [await client.generate(request_of(f"r{i}")) for i in range(4)]
        while not client._recoveries or not all(task.done() for task in client._recoveries.values()):
            await asyncio.sleep(0.01)
        return answers, client.num_live, client.restarting

    (answers, num_live, restarting), servers, warnings = run(scenario, num_servers=2, fails=True)
    assert [answer.token_ids for answer in answers] == [(7,)] * 4
    assert num_live == 1 and restarting == {servers[0].url}
    (removed,) = [text for text in warnings if "removed" in text]
    assert f"removed SGLang server {servers[0].url}: it died again 1 of 2 servers remain." in removed
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_removed_attached_server_rejoins_when_it_recovers():
    async def scenario(client, fakes):
        fakes[1].healthy, fakes[1].probe_s, fakes[1].handler = True, 0.0, None
        while client.num_live == 2 or not client._returns:
            await client.generate(request_of(f"r{time.monotonic()}"))
        servers[0].back = True
        while client.num_live < 2:
            await asyncio.sleep(0.01)

    servers = []
    _, _, warnings = run(scenario, num_servers=2, kind=Attached, known=servers)
    assert "It rejoins automatically if it recovers." in warnings[1] and "serves again" in warnings[-1]
    assert "2 of 2" not in warnings[1]


def test_server_that_recovers_without_a_valid_reply_is_removed():
    """Restarts that fix nothing must end at the limit."""

    class Useless(Attached):
        def restart(self, while_waiting=lambda: None):
            self.num_restarts += 1
            self.fake.healthy, self.fake.probe_s = True, 0.0

    async def scenario(client, fakes):
        async def page(body):
            return web.Response(text="<html>")

        fakes[0].healthy, fakes[0].probe_s, fakes[0].handler = True, 0.0, page
        with pytest.raises(ServerError, match="no valid reply since it was recovered 3 times: 3 consecutive invalid replies"):
            while True:
                with contextlib.suppress(InvalidReply):
                    await client.generate(request_of())

    _, (server,), _ = run(scenario, kind=Useless)
    assert server.num_restarts == 3


def test_close_does_not_wait_for_a_restart_in_progress():
    class Endless(Restartable):
        abandoned = threading.Event()

        def restart(self, while_waiting=lambda: None):
            self.abandoned.wait(30)
            raise ServerError("the run ends")

        def abandon(self):
            self.abandoned.set()

    async def scenario(client, fakes):
        call = asyncio.ensure_future(client.generate(request_of()))
        while not client._recoveries:
            await asyncio.sleep(0.01)
        call.cancel()

    began = time.monotonic()
    run(scenario, kind=Endless)
    assert time.monotonic() - began < 5
