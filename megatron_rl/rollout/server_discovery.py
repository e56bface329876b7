"""Servers join and leave while a run goes on: what names them (``rollout.urls_file``, a router) is asked again and again.

Laws: a server that joins has the present weights before its first request; one that leaves gets no further request, and
those in progress come back with the tokens that they have, and go on elsewhere; the last server never leaves. What the file
says is tried again later where it cannot be done now, and nothing here ends a run.
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
"""After which a server that could not join is tried again."""


async def follow_discovery(
    named_by: str, key: str, live: RecoveringClient, attach: Callable[[str], Server], warn: Callable[[str], None]
) -> None:
    """Until it is cancelled. ``named_by``, ``key``: as ``named_urls`` takes them.

    ``attach(url)`` looks whether a run can use that server (on a thread); raises UserError if not.
    """
    not_before: dict[str, float] = {}
    missing: set[str] = set()
    said = ""
    while True:
        await asyncio.sleep(_POLL_S)
        try:
            named = await asyncio.to_thread(named_urls, named_by, key)
            await _join(named, live, attach, warn, not_before)
            # Twice, for a look may come while the file is being written.
            before, missing = missing, {url for url in live.urls if url not in named}
            wrong = await _leave(sorted(missing & before), named, live, not_before)
            wrong = wrong and f"{named_by} names no server that serves: {wrong} stay until it does"
        except (UserError, OSError) as error:
            wrong = f"{error}; the servers stay as they are"
        except Exception as error:  # whatever it is, the run goes on, and so does this
            wrong = f"the servers that {named_by} names could not be followed ({type(error).__name__}: {error}); it is tried again"
        if wrong and wrong != said:
            warn(wrong)
        said = wrong


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
    """The servers that should, but stay, for no other would serve."""
    if gone and not set(named) & set(live.client.live_urls):
        return ", ".join(gone)
    await asyncio.gather(*[live.leave(url) for url in gone])
    for url in gone:
        not_before.pop(url, None)
    return ""
