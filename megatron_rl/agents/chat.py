"""Requests and answers of a chat, the same for all protocols.

A request's messages have the form that chat templates read: OpenAI's chat messages, with the arguments of tool calls as
objects and thoughts as ``reasoning_content``. Everything that a protocol adds (ids, nulls, blocks, items) is gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megatron_rl.data.tokenizer import Message
from megatron_rl.errors import UserError


class Protocol(StrEnum):
    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"


class BadRequest(UserError):
    """A request that cannot be answered; one line, which names the field."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next answer of a conversation."""

    protocol: Protocol
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Tools in OpenAI's chat form."""
    model: str = ""
    max_tokens: int = 0
    """Largest number of tokens of the answer; 0 if the request sets none."""
    stops: tuple[str, ...] = ()
    """Strings that end the answer, which does not include them."""
    stream: bool = False
    include_usage: bool = True
    """True if the end of a streamed answer counts tokens."""
    call_tools: bool = True
    """False if the answer may have no tool calls (``tool_choice: none``): calls stay text."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as ``enable_thinking``."""
    echoes: tuple[tuple[str, ...], ...] = ()
    """For each message the ids in it that an answer may have had: of tool calls, items and signatures."""
    items: tuple[dict[str, Any], ...] = ()
    """Items of a responses request, for a next request that names this one's answer."""
    ignored: tuple[str, ...] = ()
    """Fields of the request without effect: the recipe sets how tokens are sampled."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: str
    """JSON of an object."""


@dataclass(frozen=True)
class ChatAnswer:
    """An answer of the model, read from the tokens of one turn."""

    id: str
    text: str = ""
    thoughts: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"
    """"stop", "tool_calls", or "length" if a limit cut the answer: then it has no stop token."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    stop_string: str = ""
    """The request's string that ended the answer in place of a stop token; the row has its tokens."""
