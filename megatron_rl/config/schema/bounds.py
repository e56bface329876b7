"""What a value must be: by its field's annotation, and by the bound at the field: ``num_steps: int = at_least(1, default=100)``.

Invariant: what holds for every key of a kind is checked from the annotation, so that a new key needs nothing for it. Numbers
are finite (nan and infinity are no numbers of a recipe), seconds (keys that end in ``_s``) are at most a few months,
texts can be written as UTF-8 and hold no NUL, and lists and mappings are such with items of their type.
"""

import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin

_T = TypeVar("_T")
_MAX_FLOAT = 1e30
"""Leaves room for a product before float32 overflows."""
_MAX_INT = 2**53
"""The largest number up to which JSON's readers agree on every integer."""
_MAX_SECONDS = 10**7
"""Well below what clocks and condition variables take (9e9 s)."""
_MAX_SHOWN = 60
"""Characters of a wrong value in a message."""


@dataclass(frozen=True)
class Bound:
    expected: str
    """Reads on after the word "expected": "at least 1"."""
    holds: Callable[[Any], bool]


def at_least(least: float, *, default: _T) -> _T:
    return field(default=default, metadata=items_at_least(least))


def items_at_least(least: float) -> Mapping[str, Bound]:
    """Metadata for the items of a list or the values of a mapping."""
    return {"bound": Bound(f"at least {least}", lambda value: value >= least)}


def above(limit: float, *, default: _T) -> _T:
    return bounded(f"more than {limit}", lambda value: value > limit, default=default)


def share(*, default: _T) -> _T:
    return bounded("a number from 0 to 1", lambda value: 0 <= value <= 1, default=default)


def positive_share(*, default: _T) -> _T:
    return bounded("more than 0 and up to 1", lambda value: 0 < value <= 1, default=default)


def below_one(*, default: _T) -> _T:
    return bounded("a number from 0 up to but not including 1", lambda value: 0 <= value < 1, default=default)


def num_likeliest(*, default: _T) -> _T:
    return bounded("-1 (off) or at least 1", lambda value: value == -1 or value >= 1, default=default)


def bounded(expected: str, holds: Callable[[Any], bool], *, default: _T) -> _T:
    return field(default=default, metadata={"bound": Bound(expected, holds)})


def type_problems(config: object) -> Iterator[str]:
    """One message for every value in ``config`` that is not of its kind, so that nothing can be computed with it."""
    yield from _problems("", config, Any, None, with_bounds=False)


def bound_problems(key: str, value: object) -> Iterator[str]:
    """One message for every value under ``key``, a section, that is not of its kind or out of its bound."""
    yield from _problems(key, value, Any, None, with_bounds=True)


def _problems(key: str, value: object, annotation: Any, bound: Bound | None, *, with_bounds: bool) -> Iterator[str]:
    """``annotation`` and ``bound`` are those of ``value``; those of a mapping or list hold for its items."""
    annotation = Any if value is None and not_null(annotation) is not annotation else not_null(annotation)
    wrong = container_problem(key, value, annotation)
    if wrong:
        yield wrong
    elif is_dataclass(value):
        for item in fields(value):
            full = f"{key}.{item.name}" if key else item.name
            limit = item.metadata.get("bound") if with_bounds else None
            yield from _problems(full, getattr(value, item.name), item.type, limit, with_bounds=with_bounds)
    elif isinstance(value, dict | list):
        for name, part in named_items(value):
            yield from _problems(f"{key}.{name}", part, item_type(annotation), bound, with_bounds=with_bounds)
    else:
        expected = _expected(key, value, annotation, bound)
        if expected:
            yield f"{key}: expected {expected}, got {'nothing' if value == '' else shown(value)}"


def container_problem(key: str, value: Any, annotation: Any) -> str:
    """Why ``value`` is no list, mapping or section where ``annotation`` wants one, or the reverse; empty if it is."""
    wanted: Any = get_origin(annotation) or annotation
    if is_dataclass(wanted):
        good, name = isinstance(value, dict) or type(value) is wanted, "a section with keys"
    elif wanted is list:
        good, name = isinstance(value, list), "a list"
    elif wanted is dict:
        good, name = isinstance(value, dict), "a mapping (name: value)"
        if good and not all(isinstance(part, str) for part in value):
            return f"{key}: expected names that are text, got {shown(list(value))}"
    elif wanted is Any:
        return ""
    else:
        good, name = not isinstance(value, list | dict), "a single value"
    return "" if good else f"{key}: expected {name}, got {shown(value)}"


def item_type(annotation: Any) -> Any:
    """Of the items of a list, the values of a mapping; of a plain ``list`` or ``Any``: anything."""
    arguments = get_args(annotation)
    return arguments[-1] if arguments else Any


def named_items(value: dict[str, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    yield from value.items() if isinstance(value, dict) else enumerate(value)


def shown(value: object) -> str:
    """``value`` for one line of a message."""
    text = str(value) if isinstance(value, int | float) else repr(getattr(value, "value", value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def not_null(annotation: Any) -> Any:
    """``annotation`` without "or null"."""
    if not isinstance(annotation, types.UnionType):
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else annotation


def _expected(key: str, value: object, annotation: Any, bound: Bound | None) -> str:
    """What was expected of a plain ``value`` that is not it; empty for a good one."""
    kinds: dict[Any, tuple[type | types.UnionType, str]] = {
        int: (int, "a whole number"),
        float: (int | float, "a number"),
        bool: (bool, "true or false"),
        str: (str, "text"),
    }
    kind = (annotation, "one of its choices") if _is_enum(annotation) else kinds.get(annotation)
    # True is an int to Python, but a mistake in a configuration.
    if kind and (not isinstance(value, kind[0]) or (isinstance(value, bool) and annotation is not bool)):
        return kind[1]
    if annotation is Any and not (value is None or isinstance(value, int | float | str | Enum)):
        return "text, a number, true, false, null, or a list or mapping of these"
    if bound and value is not None and not bound.holds(value):
        return bound.expected
    if isinstance(value, str):
        return "" if _is_writable(value) else "text that can be written as UTF-8, without NUL"
    return _number_expected(key, value) if isinstance(value, int | float) else ""


def _number_expected(key: str, value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if key.endswith("_s") and value > _MAX_SECONDS:
        return f"at most {_MAX_SECONDS} seconds"
    largest = _MAX_INT if isinstance(value, int) else _MAX_FLOAT
    return "" if abs(value) <= largest else f"a number of at most {largest:g} in size"


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def _is_writable(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # a lone surrogate: bytes of the command line that are no UTF-8
        return False
