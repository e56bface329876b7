"""OpenAI's chat completions: ``/v1/chat/completions``."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.agents import request_fields as fields
from megatron_rl.agents.chat import BadRequest, ChatAnswer, ChatRequest, Protocol
from megatron_rl.agents.request_fields import read
from megatron_rl.data.tokenizer import Message

_OWN_ARGUMENTS = ("chat_template", "tools", "messages", "conversation", "documents", "tokenize", "add_generation_prompt",
                  "continue_final_message", "return_dict", "return_tensors", "padding", "truncation", "max_length")  # fmt: skip


def parse(body: Mapping[str, Any]) -> ChatRequest:
    """Raises BadRequest."""
    _refuse(body)
    messages, echoes = [], []
    for place, entry in fields.objects(body, "messages"):
        message, ids = _message(entry, place)
        messages.append(message)
        echoes.append(ids)
    options = read(body, "stream_options", dict, default={})
    return ChatRequest(
        Protocol.CHAT,
        tuple(messages),
        tools=tuple(_tool(entry, place) for place, entry in fields.objects(body, "tools")),
        model=read(body, "model", str, default=""),
        max_tokens=fields.max_tokens(body, "max_completion_tokens", "max_tokens"),
        stops=fields.stops(body, "stop"),
        stream=read(body, "stream", bool, default=False),
        include_usage=read(options, "include_usage", bool, "stream_options.", default=False),
        call_tools=fields.may_call(body),
        template_arguments=_template_arguments(body),
        echoes=tuple(echoes),
        ignored=fields.ignored(body),
    )


def _refuse(body: Mapping[str, Any]) -> None:
    fields.refuse(body, "n", (1,), "send a request for each answer")
    fields.refuse(body, "logprobs", (False,), "the run keeps log-probabilities itself; leave the field out")
    fields.refuse(body, "response_format", ({"type": "text"},), "ask for the format in a message")
    fields.refuse(body, "modalities", (["text"],), "messages are text only")
    fields.refuse(body, "continue_final_message", (False,), "end with a message of the user or of a tool")
    for name in ("functions", "function_call", "audio"):
        fields.refuse(body, name, (), "use 'tools'" if name != "audio" else "messages are text only")


def _message(entry: Mapping[str, Any], place: str) -> tuple[Message, tuple[str, ...]]:
    role = read(entry, "role", str, place)
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    text = fields.parts_text(entry.get("content"), f"{place}", kinds, "" if role == "assistant" else "\n")
    if role in ("system", "developer", "user"):
        return {"role": "user" if role == "user" else "system", "content": text}, ()
    if role == "tool":
        return {"role": "tool", "tool_call_id": read(entry, "tool_call_id", str, place, default=""), "content": text}, ()
    if role != "assistant":
        raise BadRequest(f"{place}role: expected system, developer, user, assistant or tool, got {role!r}")
    fields.refuse(entry, "function_call", (), "use 'tool_calls'", place)
    message: Message = {"role": "assistant", "content": text}
    if thoughts := read(entry, "reasoning_content", str, place, default="") or read(entry, "reasoning", str, place, default=""):
        message["reasoning_content"] = thoughts
    if calls := [_call(call, where) for where, call in fields.objects(entry, "tool_calls", place)]:
        message["tool_calls"] = calls
    return message, tuple(call["id"] for call in calls)


def _call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    function = read(call, "function", dict, place)
    arguments = fields.parsed_arguments(read(function, "arguments", str, f"{place}function.", default=""), f"{place}function.arguments")
    said = {"name": read(function, "name", str, f"{place}function."), "arguments": arguments}
    return {"id": read(call, "id", str, place, default=""), "type": "function", "function": said}


def _tool(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    fields.refuse(entry, "type", ("function",), "tools are functions", place)
    function, place = read(entry, "function", dict, place), f"{place}function."
    parameters = read(function, "parameters", dict, place, default={})
    return fields.function_tool(read(function, "name", str, place), read(function, "description", str, place, default=""), parameters)


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    arguments = read(body, "chat_template_kwargs", dict, default={})
    for name, value in arguments.items():
        if name in _OWN_ARGUMENTS or not isinstance(value, str | int | float | bool | None):
            raise BadRequest(f"chat_template_kwargs.{name}: expected a text, number or truth value for the template alone")
    return arguments


def body(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = {"index": 0, "message": _said(answer), "finish_reason": answer.finish, "logprobs": None}
    return {**_head(request, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
    """A stream of the whole answer: one delta for all parts, the end, the usage if the request wants it."""
    said = _said(answer)
    if calls := said.get("tool_calls"):
        said["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    head = _head(request, answer, "chat.completion.chunk")
    for delta, finish in ((said, None), ({}, answer.finish)):
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]})
    if request.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error_events(error: Mapping[str, Any]) -> Iterator[bytes]:
    """An error inside a stream that has begun."""
    yield _event(error)
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _head(request: ChatRequest, answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": 0, "model": request.model}


def _said(answer: ChatAnswer) -> dict[str, Any]:
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls]
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if calls else "")}
    if answer.thoughts:
        message["reasoning_content"] = answer.thoughts
    return {**message, "tool_calls": calls} if calls else message


def _usage(answer: ChatAnswer) -> dict[str, int]:
    total = answer.num_prompt_tokens + answer.num_tokens
    return {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": answer.num_tokens, "total_tokens": total}
