"""HTTP for thousands of small requests to few machines, at a third of the CPU time that aiohttp takes for one.

For http:// URLs, over connections that are kept; any other URL goes the way of ``json_http.py``, whose invariants and errors hold
here, too.
"""

import asyncio
import functools
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from megatron_rl.system.http.json_http import (
    KEEPALIVE_S,
    HttpError,
    HttpReply,
    HttpSession,
    NoHttpReply,
    described,
    seconds_of,
)

_NO_BODY = (204, 304)


class _Target(NamedTuple):
    host: str
    port: int
    name: str
    """As the Host header has it."""
    path: str


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since_s: float


class KeptSession(HttpSession):
    """As HttpSession, for bodies and answers without compression."""

    def __init__(self, *, connect_timeout_s: float = 30.0, max_answer_bytes: int | None = None) -> None:
        super().__init__(connect_timeout_s=connect_timeout_s, max_answer_bytes=max_answer_bytes)
        self._idle: defaultdict[tuple[str, int], list[_Connection]] = defaultdict(list)

    async def _answer(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float | None, max_bytes: int | None
    ) -> HttpReply:
        target = _target(url)
        if target is None:
            return await super()._answer(method, url, data, headers, timeout_s, max_bytes)
        try:
            request = _request(method, target, headers, data)
            async with asyncio.timeout(timeout_s):
                return await self._exchange(target, request, max_bytes)
        except HttpError:
            raise
        except asyncio.LimitOverrunError as error:
            raise HttpError(described(error)) from error
        except (OSError, EOFError) as error:  # asyncio's TimeoutError is an OSError
            raise NoHttpReply(described(error), timed_out=isinstance(error, TimeoutError)) from error
        except ValueError as error:
            raise HttpError(described(error)) from error

    async def close(self) -> None:
        idle, self._idle = self._idle, defaultdict(list)
        for connections in idle.values():
            for connection in connections:
                connection.writer.close()
        await asyncio.sleep(0)  # their sockets close in the loop's next round
        await super().close()

    async def _exchange(self, target: _Target, request: bytes, max_bytes: int | None) -> HttpReply:
        reader, writer, _ = await self._connection(target)
        try:
            writer.write(request)
            await writer.drain()
            answer, may_stay = await _read_answer(reader, max_bytes)
        except BaseException:
            writer.close()
            raise
        if may_stay:
            self._idle[target.host, target.port].append(_Connection(reader, writer, time.monotonic()))
        else:
            writer.close()
        return answer

    async def _connection(self, target: _Target) -> _Connection:
        idle = self._idle[target.host, target.port]
        while idle:
            connection = idle.pop()
            if time.monotonic() - connection.idle_since_s < KEEPALIVE_S and not connection.reader.at_eof():
                return connection
            connection.writer.close()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return _Connection(*await asyncio.open_connection(target.host, target.port), 0.0)
        except OSError as error:
            words = f"no connection to {target.host}:{target.port}: {described(error)}"
            raise NoHttpReply(words) from error


@functools.lru_cache(1024)
def _target(url: str) -> _Target | None:
    """None for what is no plain http:// URL of printable ASCII."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme != "http" or not host or not plain or "@" in parts.netloc:
        return None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Target(host, port or 80, parts.netloc, path)


def _request(method: str, target: _Target, headers: Mapping[str, str], data: bytes | None) -> bytes:
    own = {"Host": target.name, "Content-Type": "application/json", "Accept-Encoding": "identity"}
    if data is not None or method != "GET":
        own["Content-Length"] = str(len(data or b""))
    lines = [f"{name}: {value}" for name, value in {**own, **headers}.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header holds the end of a line")
    return "\r\n".join([f"{method} {target.path} HTTP/1.1", *lines, "\r\n"]).encode("latin-1") + (data or b"")


async def _read_answer(reader: asyncio.StreamReader, max_bytes: int | None) -> tuple[HttpReply, bool]:
    """The answer, and whether the connection may be used again (RFC 9112)."""
    status = 100
    while 100 <= status < 200:  # what a server says before it answers
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise HttpError(f"no answer of HTTP/1: {first[:80]!r}")
        status = int(rest[:3])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    may_stay = version == "HTTP/1.1" and "close" not in headers.get("connection", "").lower()
    length = headers.get("content-length")
    if status in _NO_BODY:
        content = b""
    elif "chunked" in headers.get("transfer-encoding", "").lower():
        content = await _read_chunks(reader, max_bytes)
    elif length is not None:
        content = await reader.readexactly(_within(int(length), max_bytes))
    else:
        content, may_stay = await _read_to_end(reader, max_bytes), False
    return HttpReply(status, rest[4:], content, seconds_of(headers.get("retry-after", ""))), may_stay


async def _read_chunks(reader: asyncio.StreamReader, max_bytes: int | None) -> bytes:
    content = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        _within(len(content) + size, max_bytes)
        content += (await reader.readexactly(size + 2))[:-2]
    while await reader.readuntil(b"\r\n") != b"\r\n":  # fields after the last chunk
        pass
    return bytes(content)


async def _read_to_end(reader: asyncio.StreamReader, max_bytes: int | None) -> bytes:
    content = bytearray()
    while part := await reader.read(1 << 16):
        content += part
        _within(len(content), max_bytes)
    return bytes(content)


def _within(num_bytes: int, max_bytes: int | None) -> int:
    if num_bytes < 0:
        raise ValueError(f"a length of {num_bytes} bytes")
    if max_bytes is not None and num_bytes > max_bytes:
        raise HttpError(f"the answer is longer than {max_bytes} bytes")
    return num_bytes
