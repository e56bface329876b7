"""Tools that a model calls: over HTTP, as a command, or of an MCP server. Calls wait on the run's event loop, without threads.

Every call has a deadline and a key (``episode/turn/call``), which is the same when a resumed run repeats the call: HTTP sends it as
``Idempotency-Key``, a command finds it in ``TOOL_CALL_KEY``, MCP in ``_meta``. A call that is cancelled leaves no process.

Failures of two kinds: what the model's call caused (an error status, a command's exit code, no result in time) is a text for the
model; a tool that cannot be reached raises ToolUnavailable, for which no episode should be blamed.

The client of the Model Context Protocol (2025-06-18; streamable HTTP or a process's standard streams) lists tools and calls
them. One session serves all episodes; a server that must keep them apart finds the episode in the call's ``_meta``. A
connection that breaks is opened again for the next call.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from megatron_rl.agents.program import exit_of
from megatron_rl.agents.request_fields import function_tool
from megatron_rl.environments.base import EnvironmentFault
from megatron_rl.system.http.json_http import HttpError, HttpSession, NoHttpReply, backoff_s

MAX_RESULT_CHARACTERS = 1 << 16
_NUM_RETRIES, _FIRST_PAUSE_S = 6, 0.25
_VERSION = "2025-06-18"
_START_S = 60.0
_MAX_LINE_BYTES = 1 << 22
_CLIENT = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": {"name": "megatron_rl", "version": "1"}}


class ToolUnavailable(Exception):
    """A tool could not be reached; nobody knows what it would have answered."""


class Tool(Protocol):
    """A tool under the name of its description."""

    @property
    def description(self) -> dict[str, Any]:
        """Description for the chat template, in OpenAI's form."""

    async def call(self, arguments: Mapping[str, Any], key: str) -> str:
        """Return the text of the result, or of an error that the call caused. Raises ToolUnavailable."""


@dataclass(frozen=True)
class HttpTool:
    """POSTs the arguments as JSON; the body of the reply is the result."""

    description: dict[str, Any]
    url: str
    session: HttpSession

    async def call(self, arguments: Mapping[str, Any], key: str) -> str:
        pauses_s = iter(backoff_s(_NUM_RETRIES, _FIRST_PAUSE_S, jitter=0.5))
        while True:
            try:
                reply = await self.session.post(self.url, dict(arguments), timeout_s=None, headers={"Idempotency-Key": key})
                if reply.status in (502, 503, 504):
                    raise NoHttpReply(f"HTTP {reply.status}")
                return cut(reply.text if reply.status < 400 else f"error: HTTP {reply.status}: {reply.text}")
            except NoHttpReply as error:
                pause_s = next(pauses_s, None)
                if pause_s is None:
                    raise ToolUnavailable(f"{self.url}: {error}") from error
                await asyncio.sleep(pause_s)
            except HttpError as error:
                raise ToolUnavailable(f"{self.url}: {error}") from error


@dataclass(frozen=True)
class CommandTool:
    """Runs a command with the arguments as JSON in its standard input; its output is the result."""

    description: dict[str, Any]
    command: tuple[str, ...]

    async def call(self, arguments: Mapping[str, Any], key: str) -> str:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
            given.write(json.dumps(arguments).encode())
            given.seek(0)
            try:
                process = subprocess.Popen(
                    self.command,
                    stdin=given,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "TOOL_CALL_KEY": key},
                )
            except OSError as error:
                raise ToolUnavailable(f"{self.command[0]}: {error}") from error
            exited = exit_of(process)
            try:
                code = await asyncio.shield(exited)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also of what it left behind
            output.seek(0)
            text = output.read(4 * MAX_RESULT_CHARACTERS).decode(errors="replace")
            return cut(text if code == 0 else f"error: exit code {code}: {text}")


async def call_tool(tools: Mapping[str, Tool], name: str, arguments: str, key: str, timeout_s: float) -> str:
    """Call a tool by name, within a deadline. ``arguments``: the JSON of an object. Raises ToolUnavailable."""
    if name not in tools:
        return f"error: there is no tool {name!r}; the tools: {', '.join(tools)}"
    try:
        async with asyncio.timeout(timeout_s):
            return await tools[name].call(json.loads(arguments or "{}"), key)
    except TimeoutError:
        return f"error: no result within {timeout_s:g} s"


def make_tool(fields: Mapping[str, Any], session: HttpSession) -> Tool:
    """A tool of the recipe: name, description, parameters (a JSON schema), and ``url`` or ``command``. Raises ValueError."""
    known = {"name", "description", "parameters", "url", "command"}
    if unknown := set(fields) - known:
        raise ValueError(f"tools: unknown keys {sorted(unknown)}; a tool has {', '.join(sorted(known))}, or mcp_url or mcp_command")
    if not isinstance(fields.get("name"), str) or ("url" in fields) == ("command" in fields):
        raise ValueError(f"tools: expected a name, and either url or command, got {dict(fields)}")
    parameters = fields.get("parameters") or {"type": "object", "properties": {}}
    described = function_tool(fields["name"], fields.get("description", ""), parameters)
    if "url" in fields:
        return HttpTool(described, fields["url"], session)
    if not isinstance(fields["command"], Sequence) or isinstance(fields["command"], str):
        raise ValueError(f"tools: {fields['name']}: command must be a list of words, got {fields['command']!r}")
    return CommandTool(described, tuple(map(str, fields["command"])))


def named(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name. Raises EnvironmentFault if two have the same."""
    by_name: dict[str, Tool] = {}
    for tool in tools:
        name = tool.description["function"]["name"]
        if name in by_name:
            raise EnvironmentFault(f"environment.options.tools: two tools are called {name!r}; remove or rename one")
        by_name[name] = tool
    return by_name


def cut(text: str) -> str:
    """The text up to the limit of a result."""
    return text if len(text) <= MAX_RESULT_CHARACTERS else text[:MAX_RESULT_CHARACTERS] + "\n[the rest is left out]"


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
