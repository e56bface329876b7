"""Checked reading of a request's JSON: every error is a BadRequest that names the field."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from megatron_rl.agents.chat import BadRequest

MAX_DEPTH, MAX_ITEMS, MAX_STOPS = 64, 4096, 16
"""Largest nesting of a body, and largest number of entries in a list of messages, tools, calls or parts, and of stop strings."""
_KINDS: dict[type, str] = {str: "a text", int: "an integer", bool: "true or false", list: "a list", dict: "an object"}

T = TypeVar("T")


def cleaned(value: Any, place: str = "body", depth: int = 0) -> Any:
    """A copy of parsed JSON whose texts are valid Unicode: a lone surrogate becomes U+FFFD. Raises BadRequest if it is too deep."""
    if depth > MAX_DEPTH:
        raise BadRequest(f"{place}: expected at most {MAX_DEPTH} nested levels, got more; send flatter JSON")
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [cleaned(item, place, depth + 1) for item in value]
    if isinstance(value, dict):
        return {cleaned(name, place): cleaned(item, place, depth + 1) for name, item in value.items()}
    return value


def read(source: Mapping[str, Any], name: str, kind: type[T], place: str = "", *, default: T | None = None) -> T:
    """The field ``name``; a missing or null field is ``default``, and an error without a default."""
    value = source.get(name)
    if value is None and default is not None:
        return default
    return checked(value, kind, place + name)


def checked(value: Any, kind: type[T], place: str) -> T:
    """The value itself. Raises BadRequest if it has another type, or is a list that is too long."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        got = "nothing" if value is None else f"{type(value).__name__} {json.dumps(value)[:40]}"
        raise BadRequest(f"{place}: expected {_KINDS[kind]}, got {got}")
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise BadRequest(f"{place}: expected at most {MAX_ITEMS} entries, got {len(value)}")
    return value


def objects(source: Mapping[str, Any], name: str, place: str = "") -> list[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with its place; a missing list is empty."""
    entries = read(source, name, list, place, default=[])
    return [(f"{place}{name}[{i}].", checked(entry, dict, f"{place}{name}[{i}]")) for i, entry in enumerate(entries)]


def parts_text(content: Any, place: str, kinds: Sequence[str], joint: str = "\n") -> str:
    """Text of a message's content: nothing, a text, or a list of parts of the given kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for where, part in objects({"content": content}, "content", place):
        kind = read(part, "type", str, where)
        if kind not in kinds:
            raise BadRequest(f"{where}type: expected {' or '.join(map(repr, kinds))}, got {kind!r}; messages are text only")
        texts.append(read(part, "refusal" if kind == "refusal" else "text", str, where))
    return joint.join(texts)


def parsed_arguments(text: str, place: str) -> dict[str, Any]:
    """The object that a tool call's arguments spell; empty for an empty text."""
    try:
        value = cleaned(json.loads(text or "{}"), place)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{place}: expected the JSON of an object, got {text[:40]!r} ({error})") from error
    return checked(value, dict, place)


def refuse(body: Mapping[str, Any], name: str, allowed: Iterable[Any], remedy: str, place: str = "") -> None:
    """Raise BadRequest for a field that asks for something that the endpoint does not do."""
    value = body.get(name)
    if value is not None and value not in allowed:
        raise BadRequest(f"{place}{name}: {json.dumps(value)[:60]} is not supported; {remedy}")


def function_tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's chat form."""
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def max_tokens(body: Mapping[str, Any], *names: str) -> int:
    """The first of these fields that is given, at least 1; 0 without any."""
    for name in names:
        if body.get(name) is not None:
            value = read(body, name, int)
            if value < 1:
                raise BadRequest(f"{name}: expected at least 1, got {value}")
            return value
    return 0


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The strings that end an answer: a text, or a list of them."""
    given = body.get(name)
    texts = [given] if isinstance(given, str) else read(body, name, list, default=[])
    if len(texts) > MAX_STOPS:
        raise BadRequest(f"{name}: expected at most {MAX_STOPS} texts, got {len(texts)}")
    return tuple(text for i, one in enumerate(texts) if (text := checked(one, str, f"{name}[{i}]")))


def may_call(body: Mapping[str, Any]) -> bool:
    """False for ``tool_choice: none``. Raises BadRequest for a choice that would force a call."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        raise BadRequest(f"tool_choice: expected 'auto' or 'none', got {json.dumps(choice)[:60]}; ask for the call in a message")
    return kind != "none"


def ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Given fields that the recipe decides."""
    return tuple(name for name in _SAMPLING if body.get(name) is not None)


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
    "reasoning_effort", "reasoning", "thinking", "parallel_tool_calls", "verbosity",
)  # fmt: skip
