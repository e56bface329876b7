"""Reads an answer from the tokens of a turn: thoughts, text and tool calls."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.agents.chat import ChatAnswer, ChatRequest
from megatron_rl.agents.chat_template import ChatTemplate

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
        token_ids: Sampled tokens; the last is the stop token if ``stopped``.
        answer_id: Unique in the episode; ids of calls are made from it.
    """
    raise NotImplementedError
