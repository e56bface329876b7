"""Sampling from a policy that does not change: servers read its weights from the model folder.

A server that dies is started again beside the others and serves at once, for it comes up with the same weights; a
request waits while none serves. ``ServerError`` when a server cannot be brought back.

One FrozenRollout belongs to one event loop; the servers outlive it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from megatron_rl.config.schema import Config
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.client import ServerLost, SglangClient
from megatron_rl.rollout.sglang.wire import Generation, GenerationRequest


class FrozenRollout:
    def __init__(self, servers: ServerPool, client: SglangClient, warn: Callable[[str], None]) -> None:
        self._servers = servers
        self._client = client
        self._warn = warn
        self._recoveries: dict[str, asyncio.Task[None]] = {}

    async def generate(self, request: GenerationRequest, *, sticky_key: int | str | None = None) -> Generation:
        """One sample; requests with the same ``sticky_key`` share a server and its prefix cache."""
        while True:
            try:
                return await self._client.generate(request, sticky_key=sticky_key)
            except ServerLost:
                if self._client.live_urls:
                    raise  # a server that lives keeps failing: starting it again would not help
                await self._until_one_serves()

    async def _until_one_serves(self) -> None:
        waiting = set(self._recoveries.values())
        while not self._client.live_urls:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not waiting and not self._client.live_urls:
                for task in done:
                    task.result()

    def server_lost(self, url: str, reason: str) -> None:
        """The client's call when a server stops answering."""
        self._warn(f"the SGLang server at {url} is lost ({reason}); it is started again")
        self._recoveries[url] = asyncio.get_running_loop().create_task(self._bring_back(url))

    async def _bring_back(self, url: str) -> None:
        server = next(server for server in self._servers.servers if server.url == url)
        await asyncio.to_thread(server.restart)
        self._client.restore(url)
        self._warn(f"the SGLang server at {url} serves again")

    async def close(self) -> None:
        for task in self._recoveries.values():
            task.cancel()
        await asyncio.gather(*self._recoveries.values(), return_exceptions=True)


@asynccontextmanager
async def open_frozen_rollout(
    config: Config, servers: ServerPool, *, vocab_size: int, warn: Callable[[str], None]
) -> AsyncIterator[FrozenRollout]:
    """A client of ``servers`` on the running event loop."""
    rollout = config.rollout
    async with SglangClient(
        servers.urls,
        vocab_size=vocab_size,
        max_inflight_requests=rollout.max_inflight_requests,
        request_timeout_s=rollout.request_timeout_s,
        max_retries=rollout.max_retries,
        on_server_lost=lambda url, reason: frozen.server_lost(url, reason),
    ) as client:
        frozen = FrozenRollout(servers, client, warn)
        try:
            yield frozen
        finally:
            await frozen.close()
