"""Tools that a model calls: over HTTP, as a command, or of an MCP server. Calls wait on the run's event loop, without threads.

Every call has a deadline and a key (``episode/turn/call``), which is the same when a resumed run repeats the call: HTTP sends it as
``Idempotency-Key``, a command finds it in ``TOOL_CALL_KEY``, MCP in ``_meta``. A call that is cancelled leaves no process.

Failures of two kinds: what the model's call caused (an error status, a command's exit code, no result in time) is a text for the
model; a tool that cannot be reached raises ToolUnavailable, for which no episode should be blamed.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.agents.program import exit_of
from megatron_rl.agents.request_fields import function_tool
from megatron_rl.environments.base import EnvironmentFault
from megatron_rl.system.http.json_http import HttpError, HttpSession, NoHttpReply, backoff_s

MAX_RESULT_CHARACTERS = 1 << 16
_NUM_RETRIES, _FIRST_PAUSE_S = 6, 0.25


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
