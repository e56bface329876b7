"""Client of a run's servers that restarts lost servers.

A lost server is restarted while the others keep serving, gets the current weights (``readmit``) and then receives
requests again; for an attached server the client waits until it is back. While no server is left, callers of
``recovered`` and ``generate`` wait for the first server that recovers. A server is *removed* when its restarts are
used up, or when it was lost too often without a valid reply in between; a warning reports how many servers remain,
and the run continues with these. A removed attached server rejoins whenever it recovers. Once no server is left,
the last server's error is raised.

A RecoveringClient belongs to one event loop; the servers outlive it.

Servers may also ``join`` and ``leave`` during the run: ``follow_discovery`` polls their list (``rollout.urls_file``
or a router). A server that joins has the current weights before its first request. A server that leaves gets no
more requests; those in progress return with their tokens and continue on other servers. The last server never
leaves. A change that cannot be applied now is retried later, and no failure of the polling ends the run.
"""

import asyncio
import time
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
from megatron_rl.system.http.url_files import named_urls

_POLL_S = 2.0
_AGAIN_S = 60.0
"""Interval after which a server that could not join is retried."""


async def _no_readmission(url: str) -> str:
    return "the weights of its model folder"


async def _at_once() -> None:
    pass


class RecoveringClient:
    """Sends requests and recovers lost servers.

    Use ``client`` directly to handle ``ServerLost`` yourself, or ``generate`` to have it handled.
    """

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
        """``readmit(url)`` brings a restarted server to the state of the others and returns a description of it for
        a message.

        ``settled()`` returns once every publish that had already started is finished. ``num_workers``: number of
        rollout worker processes; 0 makes the calls in this process. ``far_workers``: rollout workers on other
        nodes, which take a share of the calls.
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
        """URLs of lost servers that do not have the current weights yet; ``readmit`` removes its URL."""
        self.num_restarts = 0
        self._max_restarts = config.max_restarts
        self._losses_in_a_row: dict[str, int] = {}
        """Maps URL to the number of consecutive losses without a valid reply in between."""
        self._servers = servers
        self._warn = warn
        self._readmit = readmit
        self._settled = settled
        self._recoveries: dict[str, asyncio.Task[Exception | None]] = {}
        self._returns: dict[str, asyncio.Task[None]] = {}
        """Tasks that wait for removed attached servers; no caller waits for these tasks."""

    @classmethod
    def without_trainer(cls, config: Config, servers: ServerPool, warn: Callable[[str], None]) -> Self:
        """Client for a command whose servers have the weights of the policy's folder."""
        workers, vocab_size = config.rollout.num_workers or 0, model_vocab_size(config)
        return cls(config.rollout, servers, vocab_size=vocab_size, warn=warn, num_workers=workers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def num_live(self) -> int:
        """Number of servers that currently receive requests."""
        return len(self.client.live_urls)

    async def close(self) -> None:
        self._servers.abandon_restarts()  # their threads would keep the process
        tasks = [*self._recoveries.values(), *self._returns.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()

    async def generate(self, request: GenerationRequest, *, sticky_key: int | str | None = None) -> Generation:
        """Generate one sample, retrying on other servers. Requests with the same ``sticky_key`` share a server and
        its prefix cache."""
        while True:
            try:
                return await self.client.generate(request, sticky_key=sticky_key)
            except ServerLost as lost:
                await self.wait_for_server(lost)

    async def wait_for_server(self, lost: ServerLost) -> None:
        """Return once a server serves again. Raises if none recovered, or if a running server keeps failing."""
        if lost.url in self.client.live_urls:
            raise lost
        waiting = set(self._recoveries.values())
        failure: Exception = lost
        while not self.client.live_urls:
            # Raise a failure only when no other server can recover.
            if not waiting:
                raise failure
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failure = next((error for task in done if (error := task.result())), failure)

    def restart(self, url: str, while_waiting: Callable[[], None]) -> None:
        """Restart a server and wait for it (not on the event loop). Raises ServerError."""
        self._servers.at(url).restart(while_waiting)
        self.num_restarts += 1

    def remove_server(self, url: str, error: Exception) -> None:
        """Remove a server that cannot be recovered: send it no more requests and warn."""
        self.restarting.add(url)
        self.client.drop(url)
        left = self._servers.urls
        left = [other for other in left if other in self.client.live_urls or self._comes_back(other, but=url)]
        again = " It rejoins automatically if it recovers." if self._may_return(url) else ""
        self._warn(
            f"removed SGLang server {url}: {error} {len(left)} of {len(self._servers.urls)} servers remain.{again}"
        )

    @property
    def urls(self) -> list[str]:
        """URLs of all servers of the run, including servers that are down."""
        return self._servers.urls

    def join(self, server: Server) -> None:
        """Add a server that others run; it serves once it has the current weights. Raises ServerError as
        ``ServerPool.add``."""
        url = server.url
        self.restarting.add(url)  # first, so that a publish skips this server until it has the current weights
        try:
            self._servers.add(server)
        except ServerError:
            self.restarting.discard(url)
            raise
        self.client.join(url)
        self._recoveries[url] = asyncio.get_running_loop().create_task(self._add_server(url))

    async def _add_server(self, url: str) -> Exception | None:
        try:
            weights = await self._readmit(url)
        except Exception as error:  # the run continues with the other servers
            self._servers.remove(url)
            self._warn(f"the SGLang server at {url} could not join: {error}")
            return error
        self.client.restore(url)
        self._warn(f"the SGLang server at {url} has joined, with {weights}: {self.num_live} serve")
        return None

    async def leave(self, url: str) -> None:
        """Take a server's requests back, with the tokens they have, and forget the server; returns once nothing
        uses it."""
        self.restarting.add(url)
        tasks = [task for tasks in (self._recoveries, self._returns) if (task := tasks.pop(url, None)) is not None]
        self._servers.at(url).abandon()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.leave(url)
        # A publish that has already started still sends its weights to this server.
        await self._settled()
        self._servers.remove(url)
        self._warn(f"the SGLang server at {url} has left, and may be stopped: {self.num_live} serve")

    def _may_return(self, url: str) -> bool:
        """True if the server is attached and was not removed for too many recoveries without a valid reply."""
        return not self._servers.at(url).is_ours and self._losses_in_a_row.get(url, 0) <= self._max_restarts

    def _comes_back(self, url: str, *, but: str) -> bool:
        task = self._recoveries.get(url)
        return url != but and task is not None and not task.done()

    def _server_lost(self, url: str, reason: str) -> None:
        how = "it is restarted" if self._servers.at(url).is_ours else "it rejoins once it is back"
        self._warn(f"the SGLang server at {url} is lost ({reason}); {how}, its responses continue on the others")
        # Set immediately: a publish on the main thread must skip this server from now on.
        self.restarting.add(url)
        self._recoveries[url] = asyncio.get_running_loop().create_task(self._restart_until_healthy(url, reason))

    async def _restart_until_healthy(self, url: str, reason: str) -> Exception | None:
        """Recover a server. Returns None on success and the error otherwise: no caller may wait for this task."""
        # A valid reply since the last loss shows that the server had recovered.
        self._losses_in_a_row[url] = 0 if self.client.has_served(url) else self._losses_in_a_row.get(url, 0) + 1
        try:
            if self._losses_in_a_row[url] > self._max_restarts:
                raise ServerError(f"it gave no valid reply since it was recovered {self._max_restarts} times: {reason}.")
            await self._restart_and_readmit(url)
            return None
        except Exception as error:  # any failure is reported, and the run continues with the other servers
            self.remove_server(url, error)
            if isinstance(error, ServerError) and self._may_return(url):
                self._returns[url] = asyncio.create_task(self._await_return(url))
            return error

    async def _restart_and_readmit(self, url: str) -> None:
        while True:
            await asyncio.to_thread(self._servers.at(url).restart)
            self.num_restarts += 1
            try:
                weights = await self._readmit(url)
            except UserError as error:
                # The server crashed again, or hangs, while it loaded the weights: restart again until restarts are used up.
                self._losses_in_a_row[url] += 1
                if self._losses_in_a_row[url] > self._max_restarts:
                    raise
                self._warn(f"the SGLang server at {url} did not take the weights: {error}")
                continue
            self.client.restore(url)
            self._warn(f"the SGLang server at {url} serves again, with {weights}")
            return

    async def _await_return(self, url: str) -> None:
        """Wait for an attached server that was removed after the start timeout but may still come back."""
        while True:
            try:
                return await self._restart_and_readmit(url)
            except ServerError:
                continue
            except Exception as error:
                return self.remove_server(url, error)


async def follow_discovery(
    named_by: str, key: str, live: RecoveringClient, attach: Callable[[str], Server], warn: Callable[[str], None]
) -> None:
    """Apply changes of the server list until cancelled. ``named_by``, ``key``: as in ``named_urls``.

    ``attach(url)`` checks on a thread that the run can use the server and raises UserError if not.
    """
    not_before: dict[str, float] = {}
    missing: set[str] = set()
    last_warning = ""
    while True:
        await asyncio.sleep(_POLL_S)
        try:
            named = await asyncio.to_thread(named_urls, named_by, key)
            await _join(named, live, attach, warn, not_before)
            # Missing in two polls, because the file may be read while it is being written.
            before, missing = missing, {url for url in live.urls if url not in named}
            wrong = await _leave(sorted(missing & before), named, live, not_before)
            wrong = wrong and f"{named_by} lists no server that serves: {wrong} stay until it does"
        except (UserError, OSError) as error:
            wrong = f"{error}; the servers stay unchanged"
        except Exception as error:  # no failure may end the run or the polling
            wrong = f"the servers that {named_by} lists could not be updated ({type(error).__name__}: {error}); retrying"
        if wrong and wrong != last_warning:
            warn(wrong)
        last_warning = wrong


async def _join(
    named: Sequence[str],
    live: RecoveringClient,
    attach: Callable[[str], Server],
    warn: Callable[[str], None],
    not_before: dict[str, float],
) -> None:
    for url in named:
        if url in live.urls or time.monotonic() < not_before.get(url, 0.0):
            continue
        try:
            live.join(await asyncio.to_thread(attach, url))
        except UserError as error:
            warn(f"the SGLang server at {url} cannot join: {error}")
        not_before[url] = time.monotonic() + _AGAIN_S


async def _leave(gone: Sequence[str], named: Sequence[str], live: RecoveringClient, not_before: dict[str, float]) -> str:
    """Take ``gone`` servers out. Returns the URLs that stay because no other server would be left, or an empty string."""
    if gone and not set(named) & set(live.client.live_urls):
        return ", ".join(gone)
    await asyncio.gather(*[live.leave(url) for url in gone])
    for url in gone:
        not_before.pop(url, None)
    return ""
