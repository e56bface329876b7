"""The client of a run's servers, and what happens when one of them dies or hangs.

A server that is lost is started again next to the others, made like them (``readmit``), and gets requests again; for one
that others run, the same once it is back. While no server is left, callers of ``recovered`` and ``generate`` wait for the
first one that comes back. A server is *given up* when its restarts are used up, or when it was lost so often without a
good answer in between: that is said, with the number of those that are left, and the run goes on with them. An attached
one is taken again whenever it comes back. The error of the last one is raised when none is left.

A server may also ``join`` the others, and ``leave`` them (``server_discovery.py``).

One RecoveringClient belongs to one event loop; the servers outlive it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from megatron_rl.config.derived import model_vocab_size
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.requests import Generation, GenerationRequest, ServerError, ServerLost
from megatron_rl.rollout.server_pool import Server, ServerPool
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.workers.remote_calls import RemoteWorkerInfo
from megatron_rl.rollout.workers.worker_pool import WorkerPool


async def _no_readmission(url: str) -> str:
    return "the weights of its model folder"


async def _at_once() -> None:
    pass


class RecoveringClient:
    """``client`` for those who look after ``ServerLost`` themselves; ``generate`` for those who do not."""

    def __init__(
        self,
        config: RolloutConfig,
        servers: ServerPool,
        *,
        vocab_size: int,
        warn: Callable[[str], None],
        readmit: Callable[[str], Awaitable[str]] = _no_readmission,
        settled: Callable[[], Awaitable[None]] = _at_once,
        num_workers: int = 0,
        far_workers: Sequence[RemoteWorkerInfo] = (),
    ) -> None:
        """``readmit(url)`` gives a restarted server what the others have; returns what that is, for a message.

        ``settled()`` returns once no publish is in progress that began before. ``num_workers``: processes that make the
        calls; 0: this one does. ``far_workers``: those of other nodes, which take a share of them.
        """
        self.client = SglangClient(
            servers.urls,
            vocab_size=vocab_size,
            max_inflight_requests=config.max_inflight_requests,
            request_timeout_s=config.request_timeout_s,
            max_retries=config.max_retries,
            hang_timeout_s=config.hang_timeout_s,
            api_key=servers.api_key,
            on_server_lost=self._server_lost,
        )
        self.workers = WorkerPool(num_workers, warn, far_workers) if num_workers else None
        if self.workers is not None:
            self.client.caller = self.workers
        self.restarting: set[str] = set()
        """URLs of servers that were lost and are not like the others yet; ``readmit`` takes its one out."""
        self.num_restarts = 0
        self._max_restarts = config.max_restarts
        self._losses_in_a_row: dict[str, int] = {}
        """By URL: times that a server was lost without a good answer in between."""
        self._servers = servers
        self._warn = warn
        self._readmit = readmit
        self._settled = settled
        self._recoveries: dict[str, asyncio.Task[Exception | None]] = {}
        self._returns: dict[str, asyncio.Task[None]] = {}
        """Waits for attached servers that were given up; nobody waits for these."""

    @classmethod
    def without_trainer(cls, config: Config, servers: ServerPool, warn: Callable[[str], None]) -> Self:
        """For a command whose servers have the weights of the policy's folder."""
        workers, vocab_size = config.rollout.num_workers or 0, model_vocab_size(config)
        return cls(config.rollout, servers, vocab_size=vocab_size, warn=warn, num_workers=workers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def num_live(self) -> int:
        """Servers that get requests now."""
        return len(self.client.live_urls)

    async def close(self) -> None:
        self._servers.abandon_restarts()  # their threads would keep the process
        tasks = [*self._recoveries.values(), *self._returns.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()

    async def generate(self, request: GenerationRequest, *, sticky_key: int | str | None = None) -> Generation:
        """One sample, whichever servers die. Requests with the same ``sticky_key`` share a server and its prefix cache."""
        while True:
            try:
                return await self.client.generate(request, sticky_key=sticky_key)
            except ServerLost as lost:
                await self.wait_for_server(lost)

    async def wait_for_server(self, lost: ServerLost) -> None:
        """Return once some server serves again; raise when none came back, or when a live one keeps failing."""
        if lost.url in self.client.live_urls:
            raise lost
        waiting = set(self._recoveries.values())
        failure: Exception = lost
        while not self.client.live_urls:
            # A failure counts only when no other server can come back any more.
            if not waiting:
                raise failure
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failure = next((error for task in done if (error := task.result())), failure)

    def restart(self, url: str, while_waiting: Callable[[], None]) -> None:
        """Start a server again and wait for it (not on the event loop). Raises ServerError."""
        self._servers.at(url).restart(while_waiting)
        self.num_restarts += 1

    def remove_server(self, url: str, error: Exception) -> None:
        """Send no more requests to a server that cannot be brought back, and say so."""
        self.restarting.add(url)
        self.client.drop(url)
        left = self._servers.urls
        left = [other for other in left if other in self.client.live_urls or self._comes_back(other, but=url)]
        again = " It is taken again should it come back." if self._may_return(url) else ""
        self._warn(
            f"the SGLang server at {url} is given up: {error} {len(left)} of {len(self._servers.urls)} servers are "
            f"left.{again}"
        )

    @property
    def urls(self) -> list[str]:
        """Of all servers of the run, also those that do not serve now."""
        return self._servers.urls

    def join(self, server: Server) -> None:
        """One more server, which others run; it serves once it is like the others. Raises ServerError as ``ServerPool.add``."""
        url = server.url
        self.restarting.add(url)  # before it is known: a publish must pass it over until it was made like the others
        try:
            self._servers.add(server)
        except ServerError:
            self.restarting.discard(url)
            raise
        self.client.join(url)
        self._recoveries[url] = asyncio.get_running_loop().create_task(self._add_server(url))

    async def _add_server(self, url: str) -> Exception | None:
        try:
            held = await self._readmit(url)
        except Exception as error:  # whatever it is, the others go on
            self._servers.remove(url)
            self._warn(f"the SGLang server at {url} could not join: {error}")
            return error
        self.client.restore(url)
        self._warn(f"the SGLang server at {url} has joined, with {held}: {self.num_live} serve")
        return None

    async def leave(self, url: str) -> None:
        """Have a server's requests back, with the tokens they have, and forget it; returns once nothing holds it any more."""
        self.restarting.add(url)
        tasks = [task for tasks in (self._recoveries, self._returns) if (task := tasks.pop(url, None)) is not None]
        self._servers.at(url).abandon()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.leave(url)
        await self._settled()
        self._servers.remove(url)
        self._warn(f"the SGLang server at {url} has left, and may be stopped: {self.num_live} serve")

    def _may_return(self, url: str) -> bool:
        """Others run it, and it was not given up for what it answers."""
        return not self._servers.at(url).is_ours and self._losses_in_a_row.get(url, 0) <= self._max_restarts

    def _comes_back(self, url: str, *, but: str) -> bool:
        task = self._recoveries.get(url)
        return url != but and task is not None and not task.done()

    def _server_lost(self, url: str, reason: str) -> None:
        how = "it is started again" if self._servers.at(url).is_ours else "it is taken again once it is back"
        self._warn(f"the SGLang server at {url} is lost ({reason}); {how}, its responses continue on the others")
        # At once: a publish on the main thread must pass this server over from now on.
        self.restarting.add(url)
        self._recoveries[url] = asyncio.get_running_loop().create_task(self._restart_until_healthy(url, reason))

    async def _restart_until_healthy(self, url: str, reason: str) -> Exception | None:
        """None once the server serves again, else why it does not: nobody may wait for this task."""
        self._losses_in_a_row[url] = 0 if self.client.has_served(url) else self._losses_in_a_row.get(url, 0) + 1
        try:
            if self._losses_in_a_row[url] > self._max_restarts:
                raise ServerError(f"it gave no good answer since it was brought back {self._max_restarts} times: {reason}.")
            await self._restart_and_readmit(url)
            return None
        except Exception as error:  # whatever it is, it must be said, and the others go on
            self.remove_server(url, error)
            if isinstance(error, ServerError) and self._may_return(url):
                self._returns[url] = asyncio.create_task(self._await_return(url))
            return error

    async def _restart_and_readmit(self, url: str) -> None:
        while True:
            await asyncio.to_thread(self._servers.at(url).restart)
            self.num_restarts += 1
            try:
                held = await self._readmit(url)
            except UserError as error:
                # It died again, or hangs, while it took the weights: the next restart, until they are used up.
                self._losses_in_a_row[url] += 1
                if self._losses_in_a_row[url] > self._max_restarts:
                    raise
                self._warn(f"the SGLang server at {url} did not take the weights: {error}")
                continue
            self.client.restore(url)
            self._warn(f"the SGLang server at {url} serves again, with {held}")
            return

    async def _await_return(self, url: str) -> None:
        """An attached server that did not come back in time may do so later."""
        while True:
            try:
                return await self._restart_and_readmit(url)
            except ServerError:
                continue
            except Exception as error:
                return self.remove_server(url, error)
