"""Does a server's engine still work? ``/health`` of one that hangs goes on saying so: only a token proves it.

``is_generating`` asks for one token. An engine with a long queue is not hung: where the token does not come in time, a
scheduler that answers and has requests in progress counts too. ``/health_generate`` is SGLang's question to its
scheduler, which answers between two steps of the engine, also of a full one.
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
"""Starts the ids of requests that ask for a sign of life."""
_HTTP_TIMEOUT_S = 20.0
"""Even ``/health`` does not answer for so long: the process itself is stopped or gone."""
_ASK_TIMEOUT_S = 5.0
_PAUSE_S = 1.0

_TOKEN, _SOMETHING_ELSE, _NOTHING = "token", "something else", "nothing"
"""What came back from the question for a token. A server that refuses it may work; one that is silent does not."""


async def is_generating(http: HttpSession, url: str, *, api_key: str, timeout_s: float) -> bool:
    """The engine gives a token within ``timeout_s``, or then works on others."""
    headers = bearer(api_key)
    token = asyncio.create_task(_ask_for_token(http, url, headers, timeout_s))
    health = asyncio.create_task(_status(http, url + "/health", headers, min(timeout_s, _HTTP_TIMEOUT_S)))
    scheduler = asyncio.create_task(_scheduler_answers(http, url, headers, timeout_s))
    try:
        # Whatever is known first: a token, or that nothing is there to give one.
        await asyncio.wait((token, health), return_when=asyncio.FIRST_COMPLETED)
        if token.done() and token.result() == _TOKEN:
            return True
        if await health != 200:
            return token.done() and token.result() == _TOKEN
        said = await token
        if said == _TOKEN or not await scheduler:
            return said == _TOKEN
        # Requests are counted after the question for a token has ended: it counts itself.
        return said == _SOMETHING_ELSE or await _has_requests(http, url, headers)
    finally:
        for task in (token, health, scheduler):
            task.cancel()
        await asyncio.gather(token, health, scheduler, return_exceptions=True)


def generates_token(url: str, *, api_key: str, timeout_s: float) -> bool:
    """From a thread without an event loop: the engine gives a token within ``timeout_s``."""
    with HttpThread() as http:
        return http.submit(_ask_for_token(http.session, url, bearer(api_key), timeout_s)).result() == _TOKEN


async def _ask_for_token(http: HttpSession, url: str, headers: dict[str, str], timeout_s: float) -> str:
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
    """It answers within ``timeout_s``; True as well where the server has no such question."""
    try:
        async with asyncio.timeout(timeout_s):
            while (status := await _status(http, url + "/health_generate", headers, timeout_s)) not in (200, 404, 405):
                await asyncio.sleep(_PAUSE_S if status else timeout_s)
    except TimeoutError:
        return False
    return True


async def kv_tokens(http: HttpSession, url: str, *, api_key: str) -> tuple[int, bool]:
    """How many tokens the server's KV cache holds, over its data-parallel parts, and whether it says what it does.

    0 where it does not say how many.
    """
    headers = bearer(api_key)
    loads = await _loads(http, url, headers, _ASK_TIMEOUT_S) or []
    # Before its first step a scheduler has said nothing of itself; the server has.
    info = _json((await _got(http, url + "/server_info", headers, _ASK_TIMEOUT_S)).content)
    said = [load.get("max_total_num_tokens") for load in loads]
    started_with = info.get("max_total_num_tokens") if isinstance(info, dict) else 0
    return sum(map(_count, said)) or _count(started_with), any(size is not None for size in said)


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


async def progress_between(http: HttpSession, url: str, *, api_key: str) -> Any:
    """What differs between two looks while requests grow; None where nothing runs or waits."""
    loads = await _loads(http, url, bearer(api_key), _HTTP_TIMEOUT_S)
    if loads is None:
        return object()  # one look that failed says nothing; whether the server lives, others ask
    busy = any(load.get("num_running_reqs") or load.get("num_waiting_reqs") for load in loads)
    # The scheduler's clock goes on where generation stands still.
    return [{name: value for name, value in load.items() if name != "timestamp"} for load in loads] if busy else None


async def wait_while_progressing(
    answer: Awaitable[Result], before: Any, progress: Callable[[], Awaitable[Any]], limit_s: float
) -> Result:
    """``answer``, waited for as long as ``progress()``, asked every ``limit_s``, gives something else than ``before``.

    Raises NoAnswer once it gives the same again, or None.
    """
    loop = asyncio.get_running_loop()
    looks: list[asyncio.Task[None]] = []

    async def look(before: Any) -> None:
        with contextlib.suppress(Exception):  # who cannot be asked makes none
            while (now := await progress()) is not None and now != before:
                before = now
                await asyncio.sleep(limit_s)
        limit.reschedule(loop.time())

    # A task only where there is something to look at: most answers come before.
    first_look = loop.call_later(limit_s, lambda: looks.append(loop.create_task(look(before))))
    limit = asyncio.timeout(None)
    try:
        async with limit:
            return await answer
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise NoHttpReply(f"no answer within {limit_s:.0f} s, and no progress meanwhile", timed_out=True) from error
    finally:
        first_look.cancel()
        for task in looks:
            task.cancel()


async def _has_requests(http: HttpSession, url: str, headers: dict[str, str]) -> bool:
    loads = await _loads(http, url, headers, _HTTP_TIMEOUT_S) or []
    return any(load.get("num_running_reqs") or load.get("num_waiting_reqs") for load in loads)


async def _loads(http: HttpSession, url: str, headers: dict[str, str], timeout_s: float) -> list[dict[str, Any]] | None:
    """What the server says of its work, a part each; None where it says nothing."""
    content = _json((await _got(http, url + "/v1/loads?include=core", headers, timeout_s)).content)
    loads = content.get("loads") if isinstance(content, dict) else None
    return [load for load in loads if isinstance(load, dict)] if isinstance(loads, list) else None


async def _got(http: HttpSession, url: str, headers: dict[str, str], timeout_s: float) -> HttpReply:
    """Status 0 where no answer comes."""
    try:
        return await http.get(url, timeout_s=timeout_s, headers=headers)
    except HttpError as error:
        return HttpReply(0, str(error), b"")


async def _status(http: HttpSession, url: str, headers: dict[str, str], timeout_s: float) -> int:
    """Of the answer; 0 where none comes."""
    return (await _got(http, url, headers, timeout_s)).status


def _json(content: bytes) -> Any:
    """None where it is not JSON."""
    try:
        return orjson.loads(content)
    except ValueError:
        return None
