"""The three protocols behind one set of functions: a request from a path and a body, an answer as a body or as a stream."""

from collections.abc import Iterator
from typing import Any, assert_never

from megatron_rl.agents import chat_completions, messages_api, responses_api
from megatron_rl.agents.chat import BadRequest, ChatAnswer, ChatRequest, Protocol
from megatron_rl.agents.request_fields import checked, cleaned

PATHS = {
    "/v1/chat/completions": Protocol.CHAT,
    "/v1/messages": Protocol.MESSAGES,
    "/v1/messages/count_tokens": Protocol.MESSAGES,
    "/v1/responses": Protocol.RESPONSES,
}


def parse_request(path: str, body: Any) -> ChatRequest:
    """The request in a parsed JSON body. Raises BadRequest for everything that cannot be answered."""
    if path not in PATHS:
        raise BadRequest(f"{path}: no such path; use one of {', '.join(PATHS)}", status=404)
    fields = cleaned(checked(body, dict, "body"))
    match PATHS[path]:
        case Protocol.CHAT:
            request = chat_completions.parse(fields)
        case Protocol.MESSAGES:
            request = messages_api.parse(fields, counts_only=path.endswith("count_tokens"))
        case Protocol.RESPONSES:
            request = responses_api.parse(fields)
        case protocol:
            assert_never(protocol)
    if not request.messages:
        field = "input" if request.protocol is Protocol.RESPONSES else "messages"
        raise BadRequest(f"{field}: expected at least one message, got none")
    if request.messages[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's, and answers are not continued; end with a message of the user or of a tool")
    return request


def answer_body(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    match request.protocol:
        case Protocol.CHAT:
            return chat_completions.body(request, answer)
        case Protocol.MESSAGES:
            return messages_api.body(request, answer)
        case Protocol.RESPONSES:
            return responses_api.body(request, answer)
        case protocol:
            assert_never(protocol)


def answer_events(request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
    """Server-sent events of a whole answer, made once it is complete."""
    match request.protocol:
        case Protocol.CHAT:
            return chat_completions.events(request, answer)
        case Protocol.MESSAGES:
            return messages_api.events(request, answer)
        case Protocol.RESPONSES:
            return responses_api.events(request, answer)
        case protocol:
            assert_never(protocol)


def error_body(protocol: Protocol, status: int, message: str) -> dict[str, Any]:
    """The body of an error; clients raise their own error from it."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if protocol is Protocol.MESSAGES:
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def error_events(protocol: Protocol, status: int, message: str) -> Iterator[bytes]:
    """Server-sent events of an error after a stream has begun."""
    error = error_body(protocol, status, message)
    match protocol:
        case Protocol.CHAT:
            return chat_completions.error_events(error)
        case Protocol.MESSAGES:
            return messages_api.error_events(error)
        case Protocol.RESPONSES:
            return responses_api.error_events(error)
        case other:
            assert_never(other)


_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
