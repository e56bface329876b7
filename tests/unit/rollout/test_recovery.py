"""Laws of a client whose servers are started again: nobody waits forever, and nobody is served by half a server."""

import asyncio

import pytest

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.rollout.recovery import RecoveringClient
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.client import ServerLost
from megatron_rl.rollout.sglang.server import ServerError
from tests.unit.rollout.sglang.test_client import FakeServer, request_of


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
    """``scenario(client, fakes)``, with servers that answer 500 and are not healthy until they are restarted."""
    fails = options.pop("fails", False)

    async def broken(body):
        from aiohttp import web

        return web.Response(status=500)

    async def main():
        fakes = [FakeServer(broken) for _ in range(num_servers)]
        servers = [Restartable(await fake.start(), fake, fails=fails) for fake in fakes]
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


def test_a_request_waits_until_a_lost_server_is_back():
    answers, (server,), warnings = run(
        lambda client, fakes: asyncio.gather(*[client.generate(request_of(f"r{i}")) for i in range(3)])
    )
    assert [answer.token_ids for answer in answers] == [(7,)] * 3
    assert server.num_restarts == 1
    assert "is lost" in warnings[0] and "serves again, with the weights of its model folder" in warnings[-1]


def test_a_restarted_server_serves_only_once_it_is_like_the_others():
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


def test_where_no_server_can_be_brought_back_its_error_is_raised():
    async def scenario(client, fakes):
        for _ in range(2):
            with pytest.raises(ServerError, match="died again"):
                await client.generate(request_of())

    run(scenario, fails=True)


def test_a_server_that_lives_and_keeps_failing_is_not_waited_for():
    async def scenario(client, fakes):
        fakes[0].healthy = True
        with pytest.raises(ServerLost, match="500"):
            await client.generate(request_of())

    _, (server,), _ = run(scenario)
    assert server.num_restarts == 0
