"""The client of a run's servers, and what happens when one of them dies.

A server that is lost is started again next to the others, made like them (``readmit``), and gets requests again. While
no server is left, callers of ``recovered`` and ``generate`` wait for the first one that comes back. ServerError when
none can be brought back.

One RecoveringClient belongs to one event loop; the servers outlive it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.client import ServerLost, SglangClient
from megatron_rl.rollout.sglang.wire import Generation, GenerationRequest


async def _serves_at_once(url: str) -> str:
    return "the weights of its model folder"


class RecoveringClient:
    """``client`` for those who look after ``ServerLost`` themselves; ``generate`` for those who do not."""

    def __init__(
        self,
        config: RolloutConfig,
        servers: ServerPool,
        *,
        vocab_size: int,
        warn: Callable[[str], None],
        readmit: Callable[[str], Awaitable[str]] = _serves_at_once,
    ) -> None:
        """``readmit(url)`` gives a restarted server what the others have; returns what that is, for a message."""
        self.client = SglangClient(
            servers.urls,
            vocab_size=vocab_size,
            max_inflight_requests=config.max_inflight_requests,
            request_timeout_s=config.request_timeout_s,
            max_retries=config.max_retries,
            on_server_lost=self._server_lost,
        )
        self.restarting: set[str] = set()
        """URLs of servers that were lost and are not like the others yet; ``readmit`` takes its one out."""
        self.num_restarts = 0
        self._servers = servers
        self._warn = warn
        self._readmit = readmit
        self._recoveries: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        for task in self._recoveries.values():
            task.cancel()
        await asyncio.gather(*self._recoveries.values(), return_exceptions=True)
        await self.client.close()

    async def generate(self, request: GenerationRequest, *, sticky_key: int | str | None = None) -> Generation:
        """One sample, whichever servers die. Requests with the same ``sticky_key`` share a server and its prefix cache."""
        while True:
            try:
                return await self.client.generate(request, sticky_key=sticky_key)
            except ServerLost as lost:
                await self.recovered(lost)

    async def recovered(self, lost: ServerLost) -> None:
        """Return once some server serves again; raise when none came back, or when a live one keeps failing."""
        if self.client.live_urls:
            raise lost
        waiting = set(self._recoveries.values())
        while not self.client.live_urls:
            if not waiting:
                raise lost
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            # A failure counts only when no other server can come back any more.
            if not waiting:
                for task in done:
                    task.result()

    def restart(self, url: str, while_waiting: Callable[[], None]) -> None:
        """Start a server again and wait for it (not on the event loop). Raises ServerError."""
        self._servers.at(url).restart(while_waiting)
        self.num_restarts += 1

    def _server_lost(self, url: str, reason: str) -> None:
        self._warn(f"the SGLang server at {url} is lost ({reason}); it is started again, its requests go to the others")
        # At once: a publish on the main thread must pass this server over from now on.
        self.restarting.add(url)
        self._recoveries[url] = asyncio.get_running_loop().create_task(self._bring_back(url))

    async def _bring_back(self, url: str) -> None:
        await asyncio.to_thread(self._servers.at(url).restart)
        self.num_restarts += 1
        held = await self._readmit(url)
        self.client.restore(url)
        self._warn(f"the SGLang server at {url} serves again, with {held}")
