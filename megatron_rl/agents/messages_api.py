"""Anthropic's messages: ``/v1/messages`` and its ``count_tokens``."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.agents import request_fields as fields
from megatron_rl.agents.chat import BadRequest, ChatAnswer, ChatRequest, Protocol
from megatron_rl.agents.request_fields import parsed_arguments, read
from megatron_rl.data.tokenizer import Message


def parse(body: Mapping[str, Any], *, counts_only: bool = False) -> ChatRequest:
    """Raises BadRequest."""
    for name in ("mcp_servers", "container"):
        fields.refuse(body, name, ([],), "tools run in the program")
    messages: list[Message] = []
    echoes: list[tuple[str, ...]] = []
    if system := fields.parts_text(body.get("system"), "system.", ("text",)):
        messages.append({"role": "system", "content": system})
        echoes.append(())
    for place, entry in fields.objects(body, "messages"):
        for message, ids in _messages(entry, place):
            messages.append(message)
            echoes.append(ids)
    limit = fields.max_tokens(body, "max_tokens")
    if not limit and not counts_only:
        raise BadRequest("max_tokens: expected an integer, got nothing")
    return ChatRequest(
        Protocol.MESSAGES,
        tuple(messages),
        tools=tuple(_tool(entry, place) for place, entry in fields.objects(body, "tools")),
        model=read(body, "model", str, default=""),
        max_tokens=limit,
        stops=fields.stops(body, "stop_sequences"),
        stream=read(body, "stream", bool, default=False),
        call_tools=fields.may_call(body),
        echoes=tuple(echoes),
        ignored=fields.ignored(body),
    )


def _messages(entry: Mapping[str, Any], place: str) -> list[tuple[Message, tuple[str, ...]]]:
    """A user's message becomes its tool results, each a message, and its text, in the given order."""
    role = read(entry, "role", str, place)
    if role not in ("user", "assistant"):
        raise BadRequest(f"{place}role: expected user or assistant, got {role!r}; 'system' is a field of its own")
    content = entry.get("content")
    blocks = fields.objects(entry, "content", place) if not isinstance(content, str) else [(place, {"type": "text", "text": content})]
    if role == "assistant":
        return [_assistant(blocks)]
    found: list[Message] = []
    for where, block in blocks:
        kind = read(block, "type", str, where)
        if kind == "tool_result":
            result = fields.parts_text(block.get("content"), where, ("text",))
            found.append({"role": "tool", "tool_call_id": read(block, "tool_use_id", str, where), "content": result})
        elif kind == "text" and found and found[-1]["role"] == "user":
            found[-1]["content"] += "\n" + read(block, "text", str, where)
        elif kind == "text":
            found.append({"role": "user", "content": read(block, "text", str, where)})
        else:
            raise BadRequest(f"{where}type: expected 'text' or 'tool_result', got {kind!r}; messages are text only")
    return [(message, ()) for message in found]


def _assistant(blocks: list[tuple[str, dict[str, Any]]]) -> tuple[Message, tuple[str, ...]]:
    text, thoughts, calls, ids = "", "", [], []
    for where, block in blocks:
        match kind := read(block, "type", str, where):
            case "text":
                text += read(block, "text", str, where)
            case "thinking":
                thoughts += read(block, "thinking", str, where)
                ids.append(read(block, "signature", str, where, default=""))
            case "redacted_thinking":
                continue
            case "tool_use":
                said = {"name": read(block, "name", str, where), "arguments": read(block, "input", dict, where, default={})}
                ids.append(read(block, "id", str, where))
                calls.append({"id": ids[-1], "type": "function", "function": said})
            case _:
                raise BadRequest(f"{where}type: expected 'text', 'thinking' or 'tool_use', got {kind!r}")
    message: Message = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message, tuple(ids)


def _tool(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    fields.refuse(entry, "type", ("custom",), "tools run in the program and have an input_schema", place)
    description = read(entry, "description", str, place, default="")
    return fields.function_tool(read(entry, "name", str, place), description, read(entry, "input_schema", dict, place))


def body(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    return {**_head(request, answer), **_end(answer), "content": _blocks(answer), "usage": _usage(answer)}


def events(request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
    """A stream of the whole answer: each block in one delta."""
    usage = _usage(answer)
    start = {**_head(request, answer), "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield _event({"type": "message_start", "message": start})
    for index, block in enumerate(_blocks(answer)):
        empty: dict[str, Any] = {name: {"input": {}}.get(name, "") for name in block if name not in ("type", "id", "name")}
        yield _event({"type": "content_block_start", "index": index, "content_block": {**block, **empty}})
        for delta in _deltas(block):
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    yield _event({"type": "message_delta", "delta": _end(answer), "usage": usage})
    yield _event({"type": "message_stop"})


def error_events(error: Mapping[str, Any]) -> Iterator[bytes]:
    """An error inside a stream that has begun."""
    yield _event(error)


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _end(answer: ChatAnswer) -> dict[str, Any]:
    if answer.stop_string and not answer.calls:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    return {"stop_reason": _STOP_REASONS[answer.finish], "stop_sequence": None}


def _event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()


def _head(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": request.model, "stop_sequence": None}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens}


def _blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Thoughts, text, calls; the signature of the thoughts is the answer's id, which clients send back."""
    blocks: list[dict[str, Any]] = []
    if answer.thoughts:
        blocks.append({"type": "thinking", "thinking": answer.thoughts, "signature": answer.id})
    if answer.text or not answer.calls:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        value = parsed_arguments(call.arguments, "arguments")
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
    return blocks


def _deltas(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    if block["type"] == "thinking":
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]
    if block["type"] == "text":
        return [{"type": "text_delta", "text": block["text"]}]
    return [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
