"""Liveness probes of a server. ``/health`` of a hung server may still succeed, so only a generated token proves
progress.

``is_generating`` requests one token. A server with a long queue is not hung: if the token does not arrive in time,
a scheduler that answers and has requests in progress counts too. ``/health_generate`` queries the scheduler, which
answers between two forward steps, also under full load.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson

from megatron_rl.system.http.json_http import HttpError, HttpReply, HttpSession, HttpThread, NoHttpReply, bearer

Result = TypeVar("Result")

PROBE_RID = "probe-"
"""Prefix of the ids of probe requests."""
_HTTP_TIMEOUT_S = 20.0
"""Timeout after which a silent ``/health`` means that the process itself is stopped or gone."""
_QUERY_TIMEOUT_S = 5.0
_PAUSE_S = 1.0

_TOKEN, _SOMETHING_ELSE, _NOTHING = "token", "something else", "nothing"
"""Results of the token probe. A server that refuses the probe may be healthy; a silent one is not."""


async def is_generating(http: HttpSession, url: str, *, api_key: str, timeout_s: float) -> bool:
    """True if the server generates a token within ``timeout_s``, or then still works on other requests."""
    headers = bearer(api_key)
    token = asyncio.create_task(_probe_token(http, url, headers, timeout_s))
    health = asyncio.create_task(_status(http, url + "/health", headers, min(timeout_s, _HTTP_TIMEOUT_S)))
    scheduler = asyncio.create_task(_scheduler_answers(http, url, headers, timeout_s))
    try:
        # Return early on the first certain result: a token, or a failed health check.
        await asyncio.wait((token, health), return_when=asyncio.FIRST_COMPLETED)
        if token.done() and token.result() == _TOKEN:
            return True
        if await health != 200:
            return token.done() and token.result() == _TOKEN
        result = await token
        if result == _TOKEN or not await scheduler:
            return result == _TOKEN
        # Count requests only after the token probe has ended, because it would count itself.
        return result == _SOMETHING_ELSE or await _has_requests(http, url, headers)
    finally:
        for task in (token, health, scheduler):
            task.cancel()
        await asyncio.gather(token, health, scheduler, return_exceptions=True)


def generates_token(url: str, *, api_key: str, timeout_s: float) -> bool:
    """Blocking token probe for a thread without an event loop: True if a token arrives within ``timeout_s``."""
    with HttpThread() as http:
        return http.submit(_probe_token(http.session, url, bearer(api_key), timeout_s)).result() == _TOKEN


async def _probe_token(http: HttpSession, url: str, headers: dict[str, str], timeout_s: float) -> str:
    body = {"rid": [f"{PROBE_RID}{uuid.uuid4().hex};"], "input_ids": [[0]], "sampling_params": [{"max_new_tokens": 1}]}
    try:
        answer = await http.post(url + "/generate", body, timeout_s=timeout_s, headers=headers)
    except HttpError:
        return _NOTHING
    samples = _json(answer.content)
    sample = samples[0] if isinstance(samples, list) and samples else None
    has_token = answer.status == 200 and isinstance(sample, dict) and bool(sample.get("output_ids"))
    return _TOKEN if has_token else _SOMETHING_ELSE


async def _scheduler_answers(http: HttpSession, url: str, headers: dict[str, str], timeout_s: float) -> bool:
    """True if the scheduler answers within ``timeout_s``, or if the server has no such endpoint."""
    try:
        async with asyncio.timeout(timeout_s):
            while (status := await _status(http, url + "/health_generate", headers, timeout_s)) not in (200, 404, 405):
                await asyncio.sleep(_PAUSE_S if status else timeout_s)
    except TimeoutError:
        return False
    return True


async def kv_tokens(http: HttpSession, url: str, *, api_key: str) -> tuple[int, bool]:
    """(KV cache capacity in tokens over all data-parallel ranks, True if the server reports its load).

    The capacity is 0 if the server does not report it.
    """
    headers = bearer(api_key)
    loads = await _loads(http, url, headers, _QUERY_TIMEOUT_S) or []
    # A scheduler reports nothing before its first step, but the server knows its options.
    info = _json((await _got(http, url + "/server_info", headers, _QUERY_TIMEOUT_S)).content)
    reported = [load.get("max_total_num_tokens") for load in loads]
    started_with = info.get("max_total_num_tokens") if isinstance(info, dict) else 0
    return sum(map(_count, reported)) or _count(started_with), any(size is not None for size in reported)


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


async def progress_between(http: HttpSession, url: str, *, api_key: str) -> Any:
    """Snapshot of the server's load, which changes while requests progress; None if nothing runs or waits."""
    loads = await _loads(http, url, bearer(api_key), _HTTP_TIMEOUT_S)
    if loads is None:
        return object()  # a failed poll counts as progress; is_generating decides whether the server runs
    busy = any(load.get("num_running_reqs") or load.get("num_waiting_reqs") for load in loads)
    # Drop the scheduler's clock, which advances even if generation hangs.
    return [{name: value for name, value in load.items() if name != "timestamp"} for load in loads] if busy else None


async def wait_while_progressing(answer: Awaitable[Result], before: Any, progress: Callable[[], Awaitable[Any]], limit_s: float) -> Result:
    """Await ``answer`` as long as ``progress()``, polled every ``limit_s``, differs from its previous value (first
    ``before``).

    Raises NoHttpReply once the value is unchanged or None.
    """
    loop = asyncio.get_running_loop()
    polls: list[asyncio.Task[None]] = []

    async def poll(before: Any) -> None:
        with contextlib.suppress(Exception):  # a server that cannot be polled makes no progress
            while (now := await progress()) is not None and now != before:
                before = now
                await asyncio.sleep(limit_s)
        limit.reschedule(loop.time())

    # Create a task only after limit_s, because most replies arrive earlier.
    first_poll = loop.call_later(limit_s, lambda: polls.append(loop.create_task(poll(before))))
    limit = asyncio.timeout(None)
    try:
        async with limit:
            return await answer
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise NoHttpReply(f"no answer within {limit_s:.0f} s, and no progress meanwhile", timed_out=True) from error
    finally:
        first_poll.cancel()
        for task in polls:
            task.cancel()


async def _has_requests(http: HttpSession, url: str, headers: dict[str, str]) -> bool:
    loads = await _loads(http, url, headers, _HTTP_TIMEOUT_S) or []
    return any(load.get("num_running_reqs") or load.get("num_waiting_reqs") for load in loads)


async def _loads(http: HttpSession, url: str, headers: dict[str, str], timeout_s: float) -> list[dict[str, Any]] | None:
    """Load per data-parallel rank as reported by the server; None if it reports nothing."""
    content = _json((await _got(http, url + "/v1/loads?include=core", headers, timeout_s)).content)
    loads = content.get("loads") if isinstance(content, dict) else None
    return [load for load in loads if isinstance(load, dict)] if isinstance(loads, list) else None


async def _got(http: HttpSession, url: str, headers: dict[str, str], timeout_s: float) -> HttpReply:
    """GET ``url``. Returns a reply with status 0 if no reply arrives."""
    try:
        return await http.get(url, timeout_s=timeout_s, headers=headers)
    except HttpError as error:
        return HttpReply(0, str(error), b"")


async def _status(http: HttpSession, url: str, headers: dict[str, str], timeout_s: float) -> int:
    """HTTP status of the reply; 0 if none arrives."""
    return (await _got(http, url, headers, timeout_s)).status


def _json(content: bytes) -> Any:
    """Parsed JSON, or None if ``content`` is not JSON."""
    try:
        return orjson.loads(content)
    except ValueError:
        return None
