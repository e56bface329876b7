"""Reads an answer from the tokens of a turn: thoughts, text and tool calls.

The parsers are given; they read a text and may lose parts of it. A text without a readable call stays as it was sampled.

The run's SGLang servers have the parsers of the model that they serve, and need no tokenizer for them. A server that restarts
is asked again, or another one, until ``_PATIENCE_S`` have passed.
"""

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.agents.chat import BadRequest, ChatAnswer, ChatRequest, ToolCall
from megatron_rl.agents.chat_template import ChatTemplate
from megatron_rl.agents.request_fields import parsed_arguments
from megatron_rl.environments.base import EnvironmentFault, Services
from megatron_rl.system.http.json_http import HttpSession, NoHttpReply, backoff_s, bearer

ToolParser = Callable[[str, Sequence[dict[str, Any]]], Awaitable[tuple[str, Sequence[tuple[str, str]]]]]
"""(text, tools in OpenAI's form) -> (text without calls, calls as (name, JSON of the arguments)). SGLang's /parse_function_call."""
ThoughtParser = Callable[[str], Awaitable[tuple[str, str]]]
"""text -> (thoughts, the rest). SGLang's /separate_reasoning."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_TIMEOUT_S = 30.0
_NUM_RETRIES, _FIRST_PAUSE_S = 8, 0.25
"""Pauses of 64 s together, the time of a server's restart."""
_HARMONY_HEAD = "<|start|>assistant"
"""The prompt ends with this text, and SGLang's parser finds no call without it."""


@dataclass(frozen=True)
class Parsers:
    """Parsers of a model's texts; None: the model has no such thing."""

    tools: ToolParser | None = None
    thoughts: ThoughtParser | None = None


async def parse_turn(
    template: ChatTemplate,
    request: ChatRequest,
    token_ids: Sequence[int],
    parsers: Parsers,
    *,
    answer_id: str,
    stopped: bool,
    num_prompt_tokens: int = 0,
) -> ChatAnswer:
    """The answer in a turn's tokens; text that a parser loses stays as text.

    Args:
        token_ids: Sampled tokens. If ``stopped``, the last is the stop token, or the last of a stop string of the request.
        answer_id: Unique in the episode; ids of calls are made from it.
    """
    text = template.tokenizer.raw_text(token_ids)
    ends = [(text.index(stop), stop) for stop in request.stops if stop in text] if stopped else []
    is_string = bool(ends) and token_ids[-1] not in template.tokenizer.special_ids
    end, stop_string = min(ends) if is_string else (0, "")
    if stopped:
        text = text[:end] if is_string else template.tokenizer.raw_text(token_ids[:-1])
    thoughts = ""
    if parsers.thoughts:
        thoughts, rest = await parsers.thoughts(text)
        text = rest if thoughts or rest else text
    calls: list[ToolCall] = []
    if parsers.tools and request.tools and request.call_tools:
        rest, found = await parsers.tools(text, request.tools)
        calls = [ToolCall(_call_id(answer_id, i), name, arguments or "{}") for i, (name, arguments) in enumerate(found)]
        if not all(_is_object(call.arguments) for call in calls):
            calls = []
        text = rest if calls else text  # parsers return nothing for a call that they cannot read
    finish = "length" if not stopped else "tool_calls" if calls else "stop"
    return ChatAnswer(answer_id, text, thoughts, tuple(calls), finish, num_prompt_tokens, len(token_ids), stop_string)


def _is_object(text: str) -> bool:
    try:
        parsed_arguments(text, "arguments")
    except BadRequest:
        return False
    return True


def _call_id(answer_id: str, index: int) -> str:
    """Nine letters and digits: some chat templates refuse other ids."""
    number = int.from_bytes(hashlib.blake2b(f"{answer_id} {index}".encode(), digest_size=8).digest(), "big")
    return "".join(_DIGITS[number // 36**i % 36] for i in range(9))


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
