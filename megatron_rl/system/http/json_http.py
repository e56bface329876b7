"""HTTP with JSON bodies: sessions for an event loop (``HttpSession``) and for plain threads (``HttpThread``).

Invariants: every request has a deadline; a reply of any status is returned as an ``HttpReply``; a missing or unreadable reply
raises one of two errors; redirects are not followed; connections are direct, without a cluster's HTTP proxy, unless
``use_proxy`` is set.

``NoHttpReply``: the server was not reached, the connection broke, or the deadline passed. A retry may help.
``HttpError``, its base: not HTTP, a malformed URL, or a reply that is too long. A retry does not help.
"""

import asyncio
import json
import random
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import aiohttp

_KEEPALIVE_S = 2.0
"""SGLang closes idle connections after 5 s by default; a shorter time here avoids sending into a closing one."""
_CHUNK_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 26
"""Longest answer by default; a server could send without an end."""

Result = TypeVar("Result")


class HttpError(Exception):
    """The request got no readable reply. The text has the type and message of the cause."""


class NoHttpReply(HttpError):
    """No reply came. ``timed_out``: the deadline passed on an open connection; False if none was established, or it broke."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:  # the default lets pickle restore the error
        super().__init__(reason)
        self.timed_out = timed_out


@dataclass(frozen=True)
class HttpReply:
    status: int
    reason: str
    """Reason phrase of the status."""
    content: bytes
    retry_after_s: float | None = None
    """Seconds from the Retry-After header; None without such a number."""

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Parse the content. Raises ValueError, or RecursionError if it is nested too deeply."""
        return json.loads(self.text)


class HttpSession:
    """Keep-alive connections for one event loop, without a limit on the number of requests in progress."""

    def __init__(
        self, *, connect_timeout_s: float = 30.0, max_answer_bytes: int = _MAX_ANSWER_BYTES, use_proxy: bool = False
    ) -> None:
        """``use_proxy``: follow HTTP_PROXY and related variables."""
        self._connect_timeout_s = connect_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._use_proxy = use_proxy
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str, *, timeout_s: float | None, headers: dict[str, str] | None = None) -> HttpReply:
        return await self.request("GET", url, timeout_s=timeout_s, headers=headers)

    async def post(
        self, url: str, body: Any, *, timeout_s: float | None, headers: dict[str, str] | None = None
    ) -> HttpReply:
        return await self.request("POST", url, body, timeout_s=timeout_s, headers=headers)

    async def request(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        timeout_s: float | None,
        headers: dict[str, str] | None = None,
        max_answer_bytes: int | None = None,
    ) -> HttpReply:
        """Send one request and read the whole reply. Raises NoHttpReply or HttpError.

        ``body``: bytes of JSON, or a JSON-serializable object; None sends no body. ``timeout_s`` covers connecting, sending
        and reading; None: the caller ends the wait. ``max_answer_bytes``: None takes the session's limit.
        """
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        try:
            async with self._opened().request(
                method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                content = await self._read(response, max_answer_bytes or self._max_answer_bytes)
                wait_s = _seconds_of(response.headers.get("Retry-After", ""))
                return HttpReply(response.status, response.reason or "", content, wait_s)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError, TimeoutError) as error:
            # A connection timeout is a TimeoutError too, but its cause and remedy differ: the machine was not reached.
            timed_out = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
            raise NoHttpReply(_described(error), timed_out=timed_out) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise HttpError(_described(error)) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:  # not in __init__, because aiohttp needs the running event loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                headers={"Content-Type": "application/json"},
                trust_env=self._use_proxy,
            )
        return self._session

    async def _read(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        content = bytearray()
        async for part in response.content.iter_chunked(_CHUNK_BYTES):
            content += part
            if len(content) > max_bytes:
                # A connection with the rest of a reply in it cannot be used again.
                response.close()
                raise HttpError(f"the reply is longer than {max_bytes} bytes")
        return bytes(content)


class HttpThread:
    """HTTP for callers without an event loop: requests run on an event loop in a separate thread.

    Usable from any thread, but not in a forked child, which lacks that thread. ``close`` cancels requests in progress.
    """

    def __init__(self, session: HttpSession | None = None) -> None:
        """``session``: an unused session, for other settings than the defaults."""
        self.session = session or HttpSession()
        """For use in coroutines passed to ``submit`` only."""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run ``work``, which uses ``session``, on the thread; returns immediately."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def submit_all(self, works: Iterable[Coroutine[Any, Any, Result]]) -> list[Future[Result]]:
        """Same as ``submit`` for many coroutines, but the thread is woken once."""
        begun = [(work, Future[Result]()) for work in works]
        self._loop.call_soon_threadsafe(self._begin, begun)
        return [future for _, future in begun]

    def _begin(self, works: Sequence[tuple[Coroutine[Any, Any, Result], Future[Result]]]) -> None:
        for work, future in works:
            task = self._loop.create_task(work)
            self._tasks.add(task)  # the event loop has only weak references to its tasks
            task.add_done_callback(partial(self._pass_on, future))

    def _pass_on(self, future: Future[Result], task: asyncio.Task[Result]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            future.cancel()
            future.set_running_or_notify_cancel()
        elif error := task.exception():
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def request(self, method: str, url: str, body: Any = None, *, timeout_s: float) -> HttpReply:
        """Same as ``HttpSession.request``, but blocks the calling thread."""
        return self.submit(self.session.request(method, url, body, timeout_s=timeout_s)).result()

    def close(self) -> None:
        self.submit(self._finish()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # first, so that their connections return to the session
        await self.session.close()


def get_once(url: str, *, timeout_s: float, headers: dict[str, str] | None = None) -> HttpReply:
    """Send one GET request from a thread without an event loop, over a new connection. Raises NoHttpReply or HttpError."""
    with HttpThread() as http:
        return http.submit(http.session.get(url, timeout_s=timeout_s, headers=headers)).result()


def backoff_s(num_retries: int, first_s: float, *, jitter: float = 0.0) -> Iterator[float]:
    """Yield the seconds to wait before each retry: ``first_s``, then twice the previous pause.

    ``jitter`` 0.5 draws each pause between 0.5 and 1.5 times its length, so that many callers do not retry at the same time.
    """
    for retry in range(num_retries):
        pause_s = first_s * 2**retry
        yield pause_s * random.uniform(1 - jitter, 1 + jitter) if jitter else pause_s


class ApiKey(str):
    """An API key, printed as *** in the representation of objects that contain it."""

    def __repr__(self) -> str:
        return "'***'" if self else "''"


def bearer(key: str) -> dict[str, str]:
    """Return the header with an API key; no header for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _seconds_of(text: str) -> float | None:
    # The header may have a date instead of seconds; the usual pause applies then.
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
