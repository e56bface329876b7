"""Asks the run's SGLang servers to read tool calls and thoughts in a text, so that a model has the parsers that serve it.

The servers need no tokenizer for this. A server that restarts is asked again, or another one, until ``_PATIENCE_S`` have passed.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from megatron_rl.agents.turn_text import Parsers
from megatron_rl.environments.base import EnvironmentFault, Services
from megatron_rl.system.http.json_http import HttpSession, NoHttpReply, backoff_s, bearer

_TIMEOUT_S = 30.0
_NUM_RETRIES, _FIRST_PAUSE_S = 8, 0.25
"""Pauses of 64 s together, the time of a server's restart."""
_HARMONY_HEAD = "<|start|>assistant"
"""The prompt ends with this text, and SGLang's parser finds no call without it."""


class SglangParsers:
    """SGLang's parsers by name, as ``sglang.launch_server`` calls them; an empty name: the model has no such thing."""

    def __init__(self, services: Services, tool_parser: str, thought_parser: str) -> None:
        self._services = services
        self._tool_parser = tool_parser
        self._thought_parser = thought_parser
        self._session = HttpSession()
        self._turn = itertools.count()

    def parsers(self) -> Parsers:
        return Parsers(self._read_calls if self._tool_parser else None, self._read_thoughts if self._thought_parser else None)

    async def close(self) -> None:
        await self._session.close()

    async def _read_calls(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        if self._tool_parser == "gpt-oss" and not text.startswith(_HARMONY_HEAD):
            text = _HARMONY_HEAD + text
        body = {"text": text, "tools": list(tools), "tool_call_parser": self._tool_parser}
        found = await self._ask("/parse_function_call", body, "tool_parser")
        return found["normal_text"], [(call["name"], call["parameters"]) for call in found["calls"]]

    async def _read_thoughts(self, text: str) -> tuple[str, str]:
        body = {"text": text, "reasoning_parser": self._thought_parser}
        found = await self._ask("/separate_reasoning", body, "thought_parser")
        return found["reasoning_text"] or "", found["text"] or ""

    async def _ask(self, path: str, body: dict[str, Any], option: str) -> Any:
        pauses_s = iter(backoff_s(_NUM_RETRIES, _FIRST_PAUSE_S, jitter=0.5))
        while True:
            urls, problem = self._services.server_urls(), "no server runs"
            if urls:
                url = urls[next(self._turn) % len(urls)] + path
                try:
                    reply = await self._session.post(url, body, timeout_s=_TIMEOUT_S, headers=bearer(self._services.api_key))
                    if reply.status == 200:
                        return reply.json()
                    problem = f"{url} answered {reply.status}: {reply.text[:300]}"
                    if reply.status < 500:
                        raise EnvironmentFault(f"{problem}; check environment.options.{option}")
                except NoHttpReply as error:
                    problem = f"{url}: {error}"
            pause_s = next(pauses_s, None)
            if pause_s is None:
                raise EnvironmentFault(f"no server reads tool calls and thoughts: {problem}")
            await asyncio.sleep(pause_s)
