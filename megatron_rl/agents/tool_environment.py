"""The environment ``tools``: the model calls tools of the recipe until it answers without a call; the reward scores that answer.

Invariants: the next message follows from the prompt and the turns; results of earlier turns are tokens of the row already, so
that a dialogue goes on after a restart, with only the newest calls repeated, under the same keys (``tools.py``). The calls of one
turn run beside each other. A tool that cannot be reached ends the dialogue unscored, for no model caused it.
"""

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.agents.chat import ChatAnswer, ChatRequest, Protocol
from megatron_rl.agents.chat_template import ChatTemplate, Sampled
from megatron_rl.agents.tools import McpServer, Tool, ToolUnavailable, call_tool, make_tool, named
from megatron_rl.agents.turn_text import SglangParsers, parse_turn
from megatron_rl.data.tokenizer import Message as ChatMessage
from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.environments.base import Ended, Environment, EnvironmentFault, Message, Services, TurnView, register
from megatron_rl.system.http.json_http import HttpSession

_MAX_READ = 100_000
"""Answers that are kept, so that a turn is parsed once; others are parsed again."""


@register("tools")
class ToolEnvironment(Environment):
    """Answers the model's tool calls with the results of tools over HTTP, of commands, or of MCP servers."""

    opens = True

    def __init__(
        self,
        *,
        tools: list[dict[str, Any]],
        tool_parser: str,
        thought_parser: str = "",
        system_prompt: str = "",
        tool_timeout_s: float = 60.0,
        max_turns: int = 16,
        max_calls_per_turn: int = 8,
    ) -> None:
        """
        Args:
            tools: Each with name, description, parameters (JSON schema), and ``url`` or ``command``; or ``mcp_url`` or
                ``mcp_command`` alone, for all tools of that server.
            tool_parser, thought_parser: SGLang's names, such as qwen25 and qwen3.
            tool_timeout_s: After this the model reads that there was no result in time.
            max_turns: The last of these turns is the answer, whatever it calls.
        """
        if not tools or not tool_parser:
            raise ValueError("expected at least one tool, and the tool_parser of the model")
        if min(max_turns, max_calls_per_turn, tool_timeout_s) <= 0:
            raise ValueError("max_turns, max_calls_per_turn and tool_timeout_s must be above 0")
        self._session = HttpSession(use_proxy=True)
        self._own = named([make_tool(fields, self._session) for fields in tools if not _is_mcp(fields)])
        self._servers = [_server(fields) for fields in tools if _is_mcp(fields)]
        self._parser_names = tool_parser, thought_parser
        self._system_prompt = system_prompt
        self._timeout_s = tool_timeout_s
        self._max_turns = max_turns
        self._max_calls = max_calls_per_turn
        self._read: dict[tuple[int, ...], ChatAnswer] = {}

    async def start(self, services: Services) -> None:
        self._template = ChatTemplate(services.tokenizer)
        self._sglang = SglangParsers(services, *self._parser_names)
        try:
            found = [tool for server in self._servers for tool in await server.tools()]
        except ToolUnavailable as error:
            raise EnvironmentFault(f"{error}; start the server, or correct environment.options.tools") from error
        self._tools: dict[str, Tool] = named([*self._own.values(), *found])

    async def close(self) -> None:
        await asyncio.gather(self._session.close(), self._sglang.close(), *(server.close() for server in self._servers))

    async def respond(self, prompt: Prompt, turns: Sequence[TurnView], episode: str) -> Message | Ended:  # type: ignore[override]
        request = self._request(prompt)
        if not turns:
            return Message(token_ids=tuple(self._template.prompt_ids(request)))
        answers = [await self._answer(turn, request) for turn in turns]
        last = answers[-1]
        if not last.calls or last.finish == "length" or len(turns) >= self._max_turns:
            return Ended(graded_text=last.text)
        try:
            results = await self._results(last, f"{episode}/{len(turns)}")
        except ToolUnavailable as error:
            return Ended(Score(None, error=f"a tool cannot be reached: {error}"))
        messages = list(request.messages)
        for answer in answers:
            # Contents of earlier results have no influence on the tokens after the last answer.
            texts = results if answer is last else [""] * len(answer.calls)
            messages.append(_said(answer))
            messages += [{"role": "tool", "tool_call_id": c.id, "content": text} for c, text in zip(answer.calls, texts, strict=True)]
        place = len(messages) - len(last.calls) - 1
        sampled = Sampled(messages[place], turns[-1].token_ids, stopped=True)
        tail = self._template.tail_ids(replace(request, messages=tuple(messages)), place, sampled)
        if tail is None:
            raise EnvironmentFault("the chat template does not show the text of tool calls; see megatron-rl doctor --template")
        return Message(token_ids=tuple(tail))

    def graded_text(self, prompt: Prompt, turns: Sequence[TurnView], index: int) -> str | None:
        """Text of the last turn, if the budget ended the dialogue; else an Ended has the text."""
        return turns[index].text if index == len(turns) - 1 else None

    def turn_reward(self, prompt: Prompt, turns: Sequence[TurnView], index: int, grades: Mapping[int, Score]) -> Score | None:
        return grades.get(index)

    def outcome(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> Score:
        return grades.get(len(turns) - 1) or Score(0.0, "ended without an answer")

    def metrics(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> dict[str, float]:
        """``num_turns``, and ``num_calls`` of turns that were parsed in this run."""
        read = [self._read[turn.token_ids] for turn in turns if turn.token_ids in self._read]
        return {"num_turns": float(len(turns)), "num_calls": float(sum(len(answer.calls) for answer in read))}

    def _request(self, prompt: Prompt) -> ChatRequest:
        system: list[ChatMessage] = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        descriptions = tuple(tool.description for tool in self._tools.values())
        messages = (*system, {"role": "user", "content": prompt.text})
        return ChatRequest(Protocol.CHAT, messages, descriptions, template_arguments=prompt.chat_arguments)

    async def _answer(self, turn: TurnView, request: ChatRequest) -> ChatAnswer:
        if turn.token_ids not in self._read:
            stopped, parsers = turn.finish_reason == "stop", self._sglang.parsers()
            answer_id = f"{hash(turn.token_ids):x}"
            answer = await parse_turn(self._template, request, turn.token_ids, parsers, answer_id=answer_id, stopped=stopped)
            self._read[turn.token_ids] = answer
            while len(self._read) > _MAX_READ:
                self._read.pop(next(iter(self._read)))
        return self._read[turn.token_ids]

    async def _results(self, answer: ChatAnswer, key: str) -> list[str]:
        async def result(index: int) -> str:
            if index >= self._max_calls:
                return f"error: more than {self._max_calls} calls in one answer"
            call = answer.calls[index]
            return await call_tool(self._tools, call.name, call.arguments, f"{key}/{index}", self._timeout_s)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_caught(result(index))) for index in range(len(answer.calls))]
        results = [task.result() for task in tasks]
        for one in results:
            if isinstance(one, ToolUnavailable):
                raise one
        return [str(one) for one in results]


async def _caught(work: Coroutine[Any, Any, str]) -> str | ToolUnavailable:
    """The result, or the error as a value: one tool that cannot be reached must not hide what it is under a group of errors."""
    try:
        return await work
    except ToolUnavailable as error:
        return error


def _said(answer: ChatAnswer) -> ChatMessage:
    functions = [(call.id, {"name": call.name, "arguments": json.loads(call.arguments or "{}")}) for call in answer.calls]
    thoughts = {"reasoning_content": answer.thoughts} if answer.thoughts else {}
    calls = [{"id": id, "type": "function", "function": function} for id, function in functions]
    return {"role": "assistant", "content": answer.text, **thoughts, **({"tool_calls": calls} if calls else {})}


def _is_mcp(fields: Mapping[str, Any]) -> bool:
    return "mcp_url" in fields or "mcp_command" in fields


def _server(fields: Mapping[str, Any]) -> McpServer:
    if len(fields) != 1:
        raise ValueError(f"tools: an MCP server has mcp_url or mcp_command alone, got {sorted(fields)}")
    url, command = fields.get("mcp_url", ""), fields.get("mcp_command", ())
    if not isinstance(url, str) or isinstance(command, str):
        raise ValueError("tools: expected mcp_url as a text, or mcp_command as a list of words")
    return McpServer(url=url, command=[str(word) for word in command])
