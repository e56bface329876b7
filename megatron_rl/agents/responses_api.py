"""OpenAI's responses: ``/v1/responses``, with the whole history in each request, or after ``previous_response_id``."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.agents import request_fields as fields
from megatron_rl.agents.chat import BadRequest, ChatAnswer, ChatRequest, Protocol
from megatron_rl.agents.request_fields import read
from megatron_rl.data.tokenizer import Message


def parse(body: Mapping[str, Any]) -> ChatRequest:
    """Raises BadRequest."""
    _refuse(body)
    messages: list[Message] = []
    echoes: list[tuple[str, ...]] = []
    if instructions := read(body, "instructions", str, default=""):
        messages.append({"role": "system", "content": instructions})
        echoes.append(())
    items = fields.objects({"input": _input_items(body)}, "input")
    for place, item in items:
        message, ids = _message(item, place)
        if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            _join(messages[-1], message)  # the items of one answer
            echoes[-1] += ids
        else:
            messages.append(message)
            echoes.append(ids)
    return ChatRequest(
        Protocol.RESPONSES,
        tuple(messages),
        tools=tuple(_tool(entry, place) for place, entry in fields.objects(body, "tools")),
        model=read(body, "model", str, default=""),
        max_tokens=fields.max_tokens(body, "max_output_tokens"),
        stream=read(body, "stream", bool, default=False),
        call_tools=fields.may_call(body),
        echoes=tuple(echoes),
        items=tuple(item for _, item in items),
        ignored=fields.ignored(body),
    )


def _input_items(body: Mapping[str, Any]) -> Any:
    """The request's ``input`` as a list, unless it is something else than a text or a list."""
    given = body.get("input")
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def with_previous(body: Any, chains: Mapping[str, list[Any]]) -> Any:
    """The body with the whole history in ``input``. ``chains``: histories with their answers, by the id of the answer."""
    name = body.get("previous_response_id") if isinstance(body, dict) else None
    if name is None:
        return body
    if not isinstance(name, str) or name not in chains:
        raise BadRequest(f"previous_response_id: {json.dumps(name)[:60]} is no answer of this episode; send the whole history in 'input'")
    items = _input_items(body)
    return {**body, "input": [*chains[name], *items] if isinstance(items, list) else items}


def _refuse(body: Mapping[str, Any]) -> None:
    for name in ("conversation", "prompt"):
        fields.refuse(body, name, (), "send the whole history in 'input', or previous_response_id")
    fields.refuse(body, "background", (False,), "wait for the answer, or stream it")
    text = read(body, "text", dict, default={})
    if read(text, "format", dict, "text.", default={"type": "text"}).get("type") != "text":
        raise BadRequest("text.format: only plain text is supported; ask for the format in a message")


def _message(item: Mapping[str, Any], place: str) -> tuple[Message, tuple[str, ...]]:
    kind = read(item, "type", str, place, default="message")
    ids = (read(item, "id", str, place, default=""),)
    match kind:
        case "message":
            return _spoken(item, place), ids
        case "function_call":
            text = read(item, "arguments", str, place, default="")
            said = {"name": read(item, "name", str, place), "arguments": fields.parsed_arguments(text, f"{place}arguments")}
            call_id = read(item, "call_id", str, place)
            call = {"id": call_id, "type": "function", "function": said}
            return {"role": "assistant", "content": "", "tool_calls": [call]}, (*ids, call_id)
        case "function_call_output":
            output = fields.parts_text(item.get("output"), place, ("input_text", "output_text", "text"))
            return {"role": "tool", "tool_call_id": read(item, "call_id", str, place), "content": output}, ()
        case "reasoning":
            thoughts = fields.parts_text(item.get("content"), place, ("reasoning_text", "text"), "")
            return {"role": "assistant", "content": "", **({"reasoning_content": thoughts} if thoughts else {})}, ids
    raise BadRequest(f"{place}type: expected message, function_call, function_call_output or reasoning, got {kind!r}")


def _spoken(item: Mapping[str, Any], place: str) -> Message:
    role = read(item, "role", str, place)
    if role not in ("system", "developer", "user", "assistant"):
        raise BadRequest(f"{place}role: expected system, developer, user or assistant, got {role!r}")
    if role == "assistant":
        return {"role": role, "content": fields.parts_text(item.get("content"), place, ("output_text", "text", "refusal"), "")}
    content = fields.parts_text(item.get("content"), place, ("input_text", "text"))
    return {"role": "user" if role == "user" else "system", "content": content}


def _join(message: Message, more: Message) -> None:
    message["content"] += more["content"]
    if "reasoning_content" in more:
        message["reasoning_content"] = message.get("reasoning_content", "") + more["reasoning_content"]
    if "tool_calls" in more:
        message["tool_calls"] = [*message.get("tool_calls", ()), *more["tool_calls"]]


def _tool(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    fields.refuse(entry, "type", ("function",), "tools run in the program: functions only", place)
    description = read(entry, "description", str, place, default="")
    return fields.function_tool(read(entry, "name", str, place), description, read(entry, "parameters", dict, place, default={}))


def body(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    ended = "incomplete" if answer.finish == "length" else "completed"
    details = {"reason": "max_output_tokens"} if answer.finish == "length" else None
    return {**_head(request, answer), "status": ended, "incomplete_details": details, "output": _items(answer), "usage": _usage(answer)}


def chain(request: ChatRequest, answer: ChatAnswer) -> tuple[str, list[dict[str, Any]]]:
    """The answer's id, and the items that a request which names it continues."""
    return f"resp_{answer.id}", [*request.items, *_items(answer)]


def events(request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
    """A stream of the whole answer: each item in one delta."""
    whole = body(request, answer)
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    rows: list[dict[str, Any]] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for index, item in enumerate(whole["output"]):
        rows += ({**row, "output_index": index} for row in _item_events(item))
    rows.append({"type": f"response.{whole['status']}", "response": whole})
    for number, row in enumerate(rows):
        yield _event({**row, "sequence_number": number})


def error_events(error: Mapping[str, Any]) -> Iterator[bytes]:
    """An error inside a stream that has begun."""
    said = error["error"]
    yield _event({"type": "error", "message": said["message"], "code": said["type"], "param": None, "sequence_number": 0, "error": said})


def _event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()


def _item_events(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"]}
    added: dict[str, Any] = {"status": "in_progress"} if "status" in item else {}
    if "content" in item:
        added["content"] = []
    if "arguments" in item:
        added["arguments"] = ""
    yield {"type": "response.output_item.added", "item": {**item, **added}}
    for i, part in enumerate(item.get("content", ())):
        name = "output_text" if part["type"] == "output_text" else "reasoning_text"
        logprobs: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        inside = {**place, "content_index": i}
        yield {"type": "response.content_part.added", **inside, "part": {**part, "text": ""}}
        yield {"type": f"response.{name}.delta", **inside, "delta": part["text"], **logprobs}
        yield {"type": f"response.{name}.done", **inside, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **inside, "part": part}
    if "arguments" in item:
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.output_item.done", "item": item}


def _head(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    choice = "auto" if request.call_tools else "none"
    head = {"id": f"resp_{answer.id}", "object": "response", "created_at": 0, "model": request.model, "error": None}
    return {**head, "parallel_tool_calls": True, "tool_choice": choice, "tools": [], "instructions": None, "metadata": {}}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    total = answer.num_prompt_tokens + answer.num_tokens
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens, "total_tokens": total}
    return {**usage, "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}


def _items(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Thoughts, text, calls; each id contains the answer's, and clients send it back."""
    items: list[dict[str, Any]] = []
    if answer.thoughts:
        content = [{"type": "reasoning_text", "text": answer.thoughts}]
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content, "status": "completed"})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        status = "incomplete" if answer.finish == "length" else "completed"
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status, "content": [part]})
    for i, call in enumerate(answer.calls):
        named = {"type": "function_call", "id": f"fc_{answer.id}_{i}", "call_id": call.id, "name": call.name}
        items.append({**named, "arguments": call.arguments, "status": "completed"})
    return items
