"""What a value must be whatever the others are, said where its field is declared: ``num_steps: int = at_least(1, default=100)``.

A value that is not a number (nan) is out of every bound.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


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


def bound_problems(key: str, value: object, bound: Bound | None = None) -> Iterator[str]:
    """One message for every value under ``key`` that is out of its bound; ``bound`` is that of ``value`` or of its items."""
    if is_dataclass(value):
        for item in fields(value):
            full = f"{key}.{item.name}" if key else item.name
            yield from bound_problems(full, getattr(value, item.name), item.metadata.get("bound"))
    elif isinstance(value, dict | list):
        named = value if isinstance(value, dict) else dict(enumerate(value))
        for name, part in named.items():
            yield from bound_problems(f"{key}.{name}", part, bound)
    elif bound and value is not None and not bound.holds(value):
        yield f"{key}: expected {bound.expected}, got {'nothing' if value == '' else value}"
