"""Servers join and leave during a run: their list (``rollout.urls_file`` or a router) is polled.

Invariants: a server that joins has the current weights before its first request. A server that leaves gets no more
requests; those in progress return with their tokens and continue on other servers. The last server never leaves. A
change that cannot be applied now is retried later, and no failure here ends the run.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from megatron_rl.errors import UserError
from megatron_rl.rollout.recovering_client import RecoveringClient
from megatron_rl.rollout.server_pool import Server
from megatron_rl.system.http.url_files import named_urls

_POLL_S = 2.0
_AGAIN_S = 60.0
"""Interval after which a server that could not join is retried."""


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
