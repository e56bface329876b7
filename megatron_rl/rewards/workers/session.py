"""HTTP for rewards that call a server: one connection pool per event loop, and two kinds of errors.

``Transient``: a retry may succeed (no connection, 429, 5xx), so the runner retries.
``RewardCallError``: a retry cannot succeed (a refused request, a reply that is not JSON); the response is unscored.
"""

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

from megatron_rl.system.http.json_http import HttpError, HttpSession, NoHttpReply

_MAX_ANSWER_BYTES = 1 << 24
_CONNECT_TIMEOUT_S = 10.0
_MAX_SHOWN = 200
"""Maximum number of characters of a reply in an error."""

_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, HttpSession] = WeakKeyDictionary()


class Transient(Exception):
    """Raised by an async reward if a retry may succeed."""


class RewardCallError(Exception):
    """A server refused the request, or its reply is invalid."""


def _session() -> HttpSession:
    loop = asyncio.get_running_loop()  # a connection can only be used on the loop that opened it
    if loop not in _sessions:
        _sessions[loop] = HttpSession(connect_timeout_s=_CONNECT_TIMEOUT_S, max_answer_bytes=_MAX_ANSWER_BYTES)
    return _sessions[loop]


async def close_session() -> None:
    """Close the running loop's connections."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


async def post_json(url: str, body: Any, *, headers: dict[str, str] | None = None) -> Any:
    """POST ``body`` as JSON and return the reply's JSON. The caller sets the deadline.

    Raises:
        Transient, RewardCallError: the message contains the URL and the start of the reply.
    """
    return await _call("POST", url, body, headers=headers)


async def get_json(url: str) -> Any:
    """Same as ``post_json``, but GET."""
    return await _call("GET", url)


async def _call(method: str, url: str, body: Any = None, *, headers: dict[str, str] | None = None) -> Any:
    try:
        answer = await _session().request(method, url, body, timeout_s=None, headers=headers)
    except NoHttpReply as error:
        raise Transient(f"{url}: no answer ({error})") from error
    except HttpError as error:
        raise RewardCallError(f"{url}: {error}") from error
    if answer.status == 429 or answer.status >= 500:
        raise Transient(f"{url} answered {answer.status}: {answer.text[:_MAX_SHOWN]}")
    if answer.status != 200:
        raise RewardCallError(f"{url} answered {answer.status}: {answer.text[:_MAX_SHOWN]}")
    try:
        return answer.json()
    except (ValueError, RecursionError) as error:
        raise RewardCallError(f"{url}: expected JSON, got {answer.text[:_MAX_SHOWN]!r}") from error
