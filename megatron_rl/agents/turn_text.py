"""Reads an answer from the tokens of a turn: thoughts, text and tool calls.

The parsers are given; they read a text and may lose parts of it. A text without a readable call stays as it was sampled.
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.agents.chat import BadRequest, ChatAnswer, ChatRequest, ToolCall
from megatron_rl.agents.chat_template import ChatTemplate
from megatron_rl.agents.request_fields import parsed_arguments

ToolParser = Callable[[str, Sequence[dict[str, Any]]], Awaitable[tuple[str, Sequence[tuple[str, str]]]]]
"""(text, tools in OpenAI's form) -> (text without calls, calls as (name, JSON of the arguments)). SGLang's /parse_function_call."""
ThoughtParser = Callable[[str], Awaitable[tuple[str, str]]]
"""text -> (thoughts, the rest). SGLang's /separate_reasoning."""


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


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
