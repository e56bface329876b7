"""HTTP for rewards that ask a server: one pool of connections for each event loop, errors sorted into two kinds.

``Transient``: the same question may be answered a moment later (no connection, 429, 5xx); the runner asks again.
``RewardCallError``: it will not (a refused request, an answer that is not JSON); the response goes unscored.
"""

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

from megatron_rl.system.http.json_http import HttpError, HttpSession, NoHttpReply

_MAX_ANSWER_BYTES = 1 << 24
_CONNECT_TIMEOUT_S = 10.0
_MAX_SHOWN = 200
"""Characters of a server's answer that an error shows."""

_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, HttpSession] = WeakKeyDictionary()


class Transient(Exception):
    """Raised by an async reward when trying again may help."""


class RewardCallError(Exception):
    """A server refused the request, or its answer cannot be read."""


def _session() -> HttpSession:
    loop = asyncio.get_running_loop()  # connections belong to the loop that made them
    if loop not in _sessions:
        _sessions[loop] = HttpSession(connect_timeout_s=_CONNECT_TIMEOUT_S, max_answer_bytes=_MAX_ANSWER_BYTES)
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
    return await _call("POST", url, body, headers=headers)


async def get_json(url: str) -> Any:
    """Like post_json, but GET."""
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
