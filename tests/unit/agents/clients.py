"""The shapes in which clients send a conversation again, as the official clients were seen to do it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.unit.agents.chat_styles import TOOLS

Event = tuple[str, Any]
"""("system" | "user", text), ("results", [(call id, text), ...]) or ("answer", the body of an answer)."""
_FUNCTIONS = [tool["function"] for tool in TOOLS]


@dataclass(frozen=True)
class Client:
    name: str
    path: str
    body: Callable[[list[Event]], dict[str, Any]]
    """The next request."""

    def calls(self, answer: dict[str, Any]) -> list[str]:
        """Ids of an answer's calls."""
        if self.path == "/v1/messages":
            return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        if self.path == "/v1/responses":
            return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        return [call["id"] for call in answer["choices"][0]["message"].get("tool_calls", [])]


def _chat(events: list[Event], copy: Callable[[dict[str, Any]], dict[str, Any] | None]) -> dict[str, Any]:
    messages: list[dict[str, Any] | None] = []
    for kind, value in events:
        if kind == "answer":
            messages.append(copy(json.loads(json.dumps(value["choices"][0]["message"]))))
        elif kind == "results":
            messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in value]
        else:
            messages.append({"role": kind, "content": value})
    return {"model": "m", "messages": [m for m in messages if m], "tools": TOOLS}


def _dumped(message: dict[str, Any]) -> dict[str, Any]:
    """A client's own object as a dictionary: with every field that may be null."""
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls", "parsed"))
    return {**nulls, **message, "tool_calls": [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or [])] or None}


def _without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _with_call_only(message: dict[str, Any]) -> dict[str, Any] | None:
    return {**message, "provider_specific_fields": {}} if message.get("tool_calls") else None


def _messages(events: list[Event], in_javascript: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": []}
    body["tools"] = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in _FUNCTIONS]
    for kind, value in events:
        if kind == "system":
            body["system"] = [{"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}]
        elif kind == "answer":
            content = value["content"]
            if in_javascript:
                content = json.loads(json.dumps(content), parse_float=lambda text: float(text) if float(text) % 1 else int(float(text)))
            body["messages"].append({"role": "assistant", "content": content})
        elif kind == "results":
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": text}]} for id, text in value]
            body["messages"].append({"role": "user", "content": blocks})
        else:
            body["messages"].append({"role": "user", "content": value})
    return body


def _responses(events: list[Event], with_thoughts: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "input": [], "tools": [{"type": "function", "strict": True, **f} for f in _FUNCTIONS]}
    for kind, value in events:
        if kind == "system":
            body["instructions"] = value
        elif kind == "answer":
            body["input"] += [item for item in value["output"] if with_thoughts or item["type"] != "reasoning"]
        elif kind == "results":
            body["input"] += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in value]
        else:
            body["input"].append({"role": "user", "content": [{"type": "input_text", "text": value}]})
    return body


CHAT = "/v1/chat/completions"
CLIENTS = [
    Client("openai", CHAT, lambda events: _chat(events, dict)),
    Client("openai dumped", CHAT, lambda events: _chat(events, _dumped)),
    Client("openai-agents chat", CHAT, lambda events: _chat(events, _without_thoughts)),
    Client("openai responses", "/v1/responses", lambda events: _responses(events, True)),
    Client("responses without thoughts", "/v1/responses", lambda events: _responses(events, False)),
    Client("anthropic", "/v1/messages", lambda events: _messages(events, False)),
    Client("anthropic in JavaScript", "/v1/messages", lambda events: _messages(events, True)),
]
MINI_SWE_AGENT = Client("mini-swe-agent", CHAT, lambda events: _chat(events, _with_call_only))
