"""Tools of a server that speaks the Model Context Protocol (2025-06-18), over streamable HTTP or a process's standard streams.

A small client: it lists tools and calls them. One session serves all episodes; a server that must keep them apart finds the
episode in the call's ``_meta``. A connection that breaks is opened again for the next call.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from megatron_rl.agents.program import exit_of
from megatron_rl.agents.request_fields import function_tool
from megatron_rl.agents.tools import ToolUnavailable, cut

_VERSION = "2025-06-18"
_START_S = 60.0
_MAX_LINE_BYTES = 1 << 22
_CLIENT = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": {"name": "megatron_rl", "version": "1"}}


class McpServer:
    """One server, by ``url`` or ``command``."""

    def __init__(self, *, url: str = "", command: Sequence[str] = ()) -> None:
        self._transport: _HttpTransport | _ProcessTransport = _HttpTransport(url) if url else _ProcessTransport(command)
        self._name = url or " ".join(command)
        self._lock = asyncio.Lock()
        self._is_open = False

    async def tools(self) -> list["McpTool"]:
        """The server's tools. Raises ToolUnavailable."""
        found, cursor = [], None
        while True:
            page = await self.request("tools/list", {"cursor": cursor} if cursor else {})
            for tool in page["tools"]:
                described = function_tool(tool["name"], tool.get("description", ""), tool["inputSchema"])
                found.append(McpTool(described, self))
            cursor = page.get("nextCursor")
            if not cursor:
                return found

    async def request(self, method: str, parameters: Mapping[str, Any]) -> Any:
        """The result of one request. Raises ToolUnavailable, or _Refused for an error that the server reports."""
        try:
            async with self._lock:
                if not self._is_open:
                    async with asyncio.timeout(_START_S):
                        await self._transport.open()
                        await self._transport.request("initialize", _CLIENT)
                        await self._transport.notify("notifications/initialized", {})
                    self._is_open = True
            return await self._transport.request(method, parameters)
        except (aiohttp.ClientError, OSError, ValueError, KeyError, EOFError) as error:
            self._is_open = False
            raise ToolUnavailable(f"MCP server {self._name}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._transport.close()


class _Refused(Exception):
    """An error that the server reports for one request."""


@dataclass(frozen=True)
class McpTool:
    """A tool of an MCP server."""

    description: dict[str, Any]
    server: McpServer

    async def call(self, arguments: Mapping[str, Any], key: str) -> str:
        meta = {"megatron_rl/key": key, "megatron_rl/episode": key.partition("/")[0]}
        name = self.description["function"]["name"]
        try:
            result = await self.server.request("tools/call", {"name": name, "arguments": dict(arguments), "_meta": meta})
        except _Refused as error:
            return f"error: {error}"
        texts = [part.get("text") or json.dumps(part.get("resource", {})) for part in result.get("content", [])]
        return cut(("error: " if result.get("isError") else "") + "\n".join(texts))


def _result_of(message: Mapping[str, Any]) -> Any:
    if "error" in message:
        raise _Refused(message["error"].get("message", "no reason"))
    return message["result"]


class _HttpTransport:
    def __init__(self, url: str) -> None:
        self._url = url
        self._ids = itertools.count(1)
        self._session: aiohttp.ClientSession | None = None
        self._session_id = ""

    async def open(self) -> None:
        await self.close()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        self._session_id = ""

    async def request(self, method: str, parameters: Mapping[str, Any]) -> Any:
        number = next(self._ids)
        return _result_of(await self._post({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(parameters)}, number))

    async def notify(self, method: str, parameters: Mapping[str, Any]) -> None:
        await self._post({"jsonrpc": "2.0", "method": method, "params": dict(parameters)}, None)

    async def _post(self, message: dict[str, Any], number: int | None) -> Any:
        assert self._session is not None
        headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": _VERSION}
        if self._session_id:
            headers["Mcp-Session-Id"] = self._session_id
        async with self._session.post(self._url, json=message, headers=headers) as reply:
            if reply.status >= 400:
                raise ValueError(f"HTTP {reply.status}: {(await reply.text())[:200]}")
            self._session_id = reply.headers.get("Mcp-Session-Id", self._session_id)
            if number is None:
                return None
            if reply.content_type != "text/event-stream":
                return await reply.json()
            while line := await reply.content.readline():
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    if event.get("id") == number:
                        return event
        raise EOFError("the stream ended without the result")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class _ProcessTransport:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._ids = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        await self.close()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        exit_of(self._process)
        event_loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        await event_loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout)
        transport, protocol = await event_loop.connect_write_pipe(asyncio.streams.FlowControlMixin, self._process.stdin)
        self._writer = asyncio.StreamWriter(transport, protocol, None, event_loop)
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    waiting = self._waiting.get(message.get("id", 0)) if isinstance(message, dict) else None
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(EOFError("the server's process ended"))

    async def request(self, method: str, parameters: Mapping[str, Any]) -> Any:
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._write({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(parameters)})
            return _result_of(await self._waiting[number])
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, EOFError):
                await self._write({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}})
            raise
        finally:
            del self._waiting[number]

    async def notify(self, method: str, parameters: Mapping[str, Any]) -> None:
        await self._write({"jsonrpc": "2.0", "method": method, "params": dict(parameters)})

    async def _write(self, message: dict[str, Any]) -> None:
        if self._writer is None or self._reading is None or self._reading.done():
            raise EOFError("the server's process ended")
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()

    async def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if self._reading is not None:
                await asyncio.wait([self._reading])
            if self._writer is not None:
                self._writer.close()
            self._process = None
