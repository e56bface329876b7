"""HTTP for rewards that ask a server: one pool of connections for each event loop, errors sorted into two kinds.

``Transient``: the same question may be answered a moment later (no connection, 429, 5xx); the runner asks again.
``CallFailed``: it will not (a refused request, an answer that is not JSON); the response goes unscored.
"""

import asyncio
import json
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

MAX_ANSWER_BYTES = 1 << 24
CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 2.0
"""Shorter than servers keep idle connections, so that nothing is sent into one that is being closed."""
MAX_SHOWN = 200
"""Characters of a server's answer that an error shows."""

_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()


class Transient(Exception):
    """Raised by an async reward when trying again may help."""


class CallFailed(Exception):
    """A server refused the request, or its answer cannot be read."""


def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        # No limit here: the runner bounds what is under way.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        _sessions[loop] = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        )
    return _sessions[loop]


async def close_session() -> None:
    """Close the running loop's connections."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


async def post_json(url: str, body: Any, *, headers: dict[str, str] | None = None) -> Any:
    """POST ``body`` as JSON and return the answer's JSON. The caller sets the deadline.

    Raises:
        Transient, CallFailed: see above; the message names the URL and what came.
    """
    return await _call("POST", url, headers=headers, json=body)


async def get_json(url: str) -> Any:
    """Like post_json, but GET."""
    return await _call("GET", url)


async def _call(method: str, url: str, **request: Any) -> Any:
    try:
        async with _session().request(method, url, allow_redirects=False, **request) as response:
            content = await _read(url, response)
            status = response.status
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, TimeoutError) as error:
        raise Transient(f"{url}: no answer ({type(error).__name__}: {error})") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise CallFailed(f"{url}: {type(error).__name__}: {error}") from error
    text = content.decode(errors="replace")
    if status == 429 or status >= 500:
        raise Transient(f"{url} answered {status}: {text[:MAX_SHOWN]}")
    if status != 200:
        raise CallFailed(f"{url} answered {status}: {text[:MAX_SHOWN]}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"{url}: expected JSON, got {text[:MAX_SHOWN]!r}") from error


async def _read(url: str, response: aiohttp.ClientResponse) -> bytes:
    parts, num_bytes = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES:
            response.close()
            raise CallFailed(f"{url}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)
