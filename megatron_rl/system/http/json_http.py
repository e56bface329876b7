"""HTTP with JSON bodies: sessions for an event loop (``HttpSession``) and for plain threads (``HttpThread``).

Invariants: every request has a deadline; an answer of any status comes back as an ``HttpReply``, and what is no answer
raises one of two errors; redirects are not followed; machines are reached directly, without a cluster's HTTP proxy,
unless ``use_proxy`` says otherwise.

``NoHttpReply``: not reached, the connection broke, or the deadline passed. Asking again may help.
``HttpError``, its base: no HTTP, a malformed URL, an answer that is too long. Asking again will not help.
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
_MAX_ONCE_BYTES = 1 << 26

Result = TypeVar("Result")


class HttpError(Exception):
    """The request did not get an answer that can be read. Its text is the cause's type and words."""


class NoHttpReply(HttpError):
    """No answer came. ``timed_out``: the deadline passed; False where no connection was made in its time."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:  # without it, no pickle could make one
        super().__init__(reason)
        self.timed_out = timed_out


@dataclass(frozen=True)
class HttpReply:
    status: int
    reason: str
    """The status in words."""
    content: bytes
    retry_after_s: float | None = None
    """Seconds that the server asks the client to wait; None if it gives no number of seconds."""

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Raises ValueError (RecursionError where it is nested too deeply)."""
        return json.loads(self.text)


class HttpSession:
    """Kept-alive connections for one event loop; the number of requests in progress has no limit here."""

    def __init__(
        self, *, connect_timeout_s: float = 30.0, max_answer_bytes: int | None = None, use_proxy: bool = False
    ) -> None:
        """``use_proxy``: as HTTP_PROXY and its like say."""
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
        """One request and its whole answer.

        ``body``: bytes that are JSON already, or what JSON can be made of; None sends none. ``timeout_s`` covers
        connecting, sending and reading; None: the caller ends the wait. ``max_answer_bytes``: None: the session's.
        Raises NoHttpReply or HttpError.
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
            # That of connecting is a TimeoutError too, but the machine was not reached: another fault, another remedy.
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
        if self._session is None:  # not in __init__: aiohttp wants the running event loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                headers={"Content-Type": "application/json"},
                trust_env=self._use_proxy,
            )
        return self._session

    async def _read(self, response: aiohttp.ClientResponse, max_bytes: int | None) -> bytes:
        if max_bytes is None:
            return await response.read()
        content = bytearray()
        async for part in response.content.iter_chunked(_CHUNK_BYTES):
            content += part
            if len(content) > max_bytes:
                response.close()
                raise HttpError(f"the answer is longer than {max_bytes} bytes")
        return bytes(content)


class HttpThread:
    """HTTP for callers without an event loop: the requests run on the loop of a thread of its own.

    Usable from any thread. Not across a fork: the child has no such thread. ``close`` cancels requests in progress.
    """

    def __init__(self, session: HttpSession | None = None) -> None:
        """``session``: one that nobody has used yet, with other settings than the defaults."""
        self.session = session or HttpSession()
        """For coroutines given to ``submit`` only."""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run ``work``, which uses ``session``, on the thread; returns at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def submit_all(self, works: Iterable[Coroutine[Any, Any, Result]]) -> list[Future[Result]]:
        """Same as ``submit`` for many coroutines, but the thread is woken once."""
        begun = [(work, Future[Result]()) for work in works]
        self._loop.call_soon_threadsafe(self._begin, begun)
        return [future for _, future in begun]

    def _begin(self, works: Sequence[tuple[Coroutine[Any, Any, Result], Future[Result]]]) -> None:
        for work, future in works:
            task = self._loop.create_task(work)
            self._tasks.add(task)  # the loop itself may forget it
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
        await asyncio.gather(*tasks, return_exceptions=True)  # their connections go back to the session first
        await self.session.close()


def get_once(url: str, *, timeout_s: float, headers: dict[str, str] | None = None) -> HttpReply:
    """GET from a thread without an event loop, over a connection of its own. Raises NoHttpReply or HttpError."""
    with HttpThread(HttpSession(max_answer_bytes=_MAX_ONCE_BYTES)) as http:
        return http.submit(http.session.get(url, timeout_s=timeout_s, headers=headers)).result()


def backoff_s(num_retries: int, first_s: float, *, jitter: float = 0.0) -> Iterator[float]:
    """Seconds to wait before each further try: ``first_s``, then twice as long as the one before.

    ``jitter`` 0.5 draws each from half to one and a half times its length, so that many callers do not come back at
    the same moment.
    """
    for retry in range(num_retries):
        pause_s = first_s * 2**retry
        yield pause_s * random.uniform(1 - jitter, 1 + jitter) if jitter else pause_s


class ApiKey(str):
    """Shown as *** in messages that print what holds it."""

    def __repr__(self) -> str:
        return "'***'" if self else "''"


def bearer(key: str) -> dict[str, str]:
    """The header that carries an API key; none for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _seconds_of(text: str) -> float | None:
    # A date is allowed there too; a server that sends one is asked again after the usual pause.
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
