"""Checks each value against its field's annotation and bound: ``num_steps: int = at_least(1, default=100)``.

Invariant: every number and text has a kind by the last word of its key's name (a path, an address, a number of tokens, a
count), so that a new key needs no code to refuse values that no machine or run can have. A bound at the field narrows its
kind. Numbers are finite, and lists and mappings have items of their type.
"""

import math
import os
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar, get_args, get_origin

from megatron_rl.system.http.addresses import is_host

_T = TypeVar("_T")
_MAX_SHOWN = 60
"""Characters of a wrong value that a message shows."""


Bound = tuple[str, Callable[[Any], bool]]
"""(text after the word "expected" in a message: "at least 1", function that returns True for a value within the bound)."""
_MAX_FLOAT = 1e30
"""Small enough that a product with 1e8 does not overflow float32."""
_MAX_INT = 2**53
"""Largest bound below which all JSON readers represent every integer exactly."""
_LARGEST: Mapping[str, float] = {
    "seed": _MAX_INT,
    "_bytes": 2**40,
    "_mb": 10**7,
    "tokens": 10**8,
    "steps": 10**8,
    "step": 10**8,
    "horizon": 10**9,
    "_servers": 1024,
    "_workers": 1024,
    "_concurrency": 2**16,
    "_requests": 2**16,
    "_ranks": 2**17,
    "_parallel_size": 2**17,
    "_retries": 1000,
    "_restarts": 1000,
    "_epochs": 1000,
    "port": 2**16 - 1,
    "max_grad_norm": _MAX_FLOAT,
}
"""Ending of a key -> largest value, above what any machine has or any run needs."""
_LARGEST_OTHER = 10**6
_SMALLEST = 1e-20
"""Smallest size of a number that is not 0: its square still fits a float32."""
_MAX_SECONDS, _MIN_SECONDS, _MIN_TIMEOUT_S = 10**7, 1e-3, 1
"""A few months, well below the limit of clocks and condition variables (9e9 s); a millisecond; and a second, which no reply
of a server or rank that works takes."""
_FOLDER_OR_SERVER = "folder_or_server"
_PATHS = ("path", "_dir", "files", "_file")
_TEXTS = ("system_prompt", "instruction", "after", "yes_word", "no_word")
"""Keys whose text may have lines, and blanks at its ends."""
_MAX_PATH, _MAX_NAME, _MAX_TEXT = 4095, 255, 10**6
_NO_DISKS = ("/proc", "/sys", "/dev")
_ON_DISK = "/dev/shm"
_STORES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")


def at_least(least: float, *, default: _T) -> _T:
    return field(default=default, metadata=items_at_least(least))


def items_at_least(least: float) -> Mapping[str, Bound]:
    """Metadata that bounds the items of a list or the values of a mapping."""
    return {"bound": (f"at least {least}", lambda value: value >= least)}


def above(limit: float, *, default: _T) -> _T:
    return bounded(f"more than {limit}", lambda value: value > limit, default=default)


def share(*, default: _T) -> _T:
    return bounded("a number from 0 to 1", lambda value: 0 <= value <= 1, default=default)


def positive_share(*, default: _T) -> _T:
    return bounded("more than 0 and up to 1", lambda value: 0 < value <= 1, default=default)


def below_one(*, default: _T) -> _T:
    return bounded("a number from 0 up to but not including 1", lambda value: 0 <= value < 1, default=default)


def between(least: float, most: float, *, default: _T, zero: str = "") -> _T:
    """Field with a value from ``least`` to ``most``. ``zero``: meaning of 0, if 0 is valid too."""
    expected = f"{f'0 ({zero}) or ' if zero else ''}a number from {least:g} to {most:g}"
    return bounded(expected, lambda value: least <= value <= most or (bool(zero) and value == 0), default=default)


def prompt_template(*, default: _T) -> _T:
    return bounded("text with {prompt} in it once, or nothing", lambda text: not text or text.count("{prompt}") == 1, default=default)


def num_likeliest(*, default: _T) -> _T:
    return bounded("-1 (off) or at least 1", lambda value: value == -1 or value >= 1, default=default)


def bounded(expected: str, holds: Callable[[Any], bool], *, default: _T) -> _T:
    return field(default=default, metadata={"bound": (expected, holds)})


def folder_or_server(*, default: str) -> str:
    """A field whose text may also be an address, which a path may not."""
    return field(default=default, metadata={"kind": _FOLDER_OR_SERVER})


def type_problems(config: object) -> Iterator[str]:
    """Yield a message for every value in ``config`` of a wrong type, with which no other check can compute."""
    yield from _problems("", config, Any, None, "", with_bounds=False)


def bound_problems(key: str, value: object) -> Iterator[str]:
    """Yield a message for every value under ``key``, a section, of a wrong type or out of its bound."""
    yield from _problems(key, value, Any, None, "", with_bounds=True)


def _problems(key: str, value: object, annotation: Any, bound: Bound | None, name: str, *, with_bounds: bool) -> Iterator[str]:
    """Check ``value`` against its ``annotation``, ``bound`` and the kind of its field ``name``.

    Bound and kind of a mapping or list apply to its items.
    """
    annotation = Any if value is None and not_null(annotation) is not annotation else not_null(annotation)
    wrong = container_problem(key, value, annotation)
    if wrong:
        yield wrong
    elif is_dataclass(value):
        for item in fields(value):
            full = f"{key}.{item.name}" if key else item.name
            limit = item.metadata.get("bound") if with_bounds else None
            kind = item.metadata.get("kind", item.name)
            yield from _problems(full, getattr(value, item.name), item.type, limit, kind, with_bounds=with_bounds)
    elif isinstance(value, dict | list):
        for part_name, part in named_items(value):
            kind = item_type(annotation)
            part_kind = str(part_name) if kind is Any and isinstance(value, dict) else name
            yield from _problems(f"{key}.{part_name}", part, kind, bound, part_kind, with_bounds=with_bounds)
    else:
        expected = _expected(name, value, annotation, bound)
        if expected:
            yield f"{key}: expected {expected}, got {'nothing' if value == '' else shown(value)}"


def container_problem(key: str, value: Any, annotation: Any) -> str:
    """Problem if ``value`` is a list, a mapping or a section and ``annotation`` is not, or the reverse; "" without one."""
    wanted: Any = get_origin(annotation) or annotation
    if is_dataclass(wanted):
        good, name = isinstance(value, dict) or type(value) is wanted, "a section with keys"
    elif wanted is list:
        good, name = isinstance(value, list), "a list"
    elif wanted is dict:
        good, name = isinstance(value, dict), "a mapping (name: value)"
        if good and not all(isinstance(part, str) for part in value):
            return f"{key}: expected names that are text, got {shown(list(value))}"
        if good and (wrong := [part for part in value if not (part and is_one_line(part))]):
            return f"{key}: expected names of printable text, without blanks at their ends, got {shown(wrong[0])}"
    elif wanted is Any:
        return ""
    else:
        good, name = not isinstance(value, list | dict), "a single value"
    return "" if good else f"{key}: expected {name}, got {shown(value)}"


def item_type(annotation: Any) -> Any:
    """Annotation of a list's items or a mapping's values; Any for a plain ``list`` or ``Any``."""
    arguments = get_args(annotation)
    return arguments[-1] if arguments else Any


def named_items(value: dict[str, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    yield from value.items() if isinstance(value, dict) else enumerate(value)


def shown(value: object) -> str:
    """Format ``value`` for one line of a message."""
    text = str(value) if isinstance(value, int | float) else repr(getattr(value, "value", value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def not_null(annotation: Any) -> Any:
    """Remove "or null" from ``annotation``."""
    if not isinstance(annotation, types.UnionType):
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else annotation


def _expected(name: str, value: object, annotation: Any, bound: Bound | None) -> str:
    """Expectation that a plain ``value`` of the field ``name`` does not meet, or an empty string if the value is valid."""
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
    if annotation is Any:
        if not (value is None or isinstance(value, int | float | str | Enum)):
            return "text, a number, true, false, null, or a list or mapping of these"
        if isinstance(value, str):
            return "" if is_writable(value) else "text that can be written as UTF-8, without NUL"
    if bound and value is not None and not bound[1](value):
        return bound[0]
    if isinstance(value, str):
        return text_expected(name, value)
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return number_expected(name, value, is_option=annotation is Any)


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def number_expected(name: str, value: float, *, is_option: bool = False) -> str:
    """Return the expectation that ``value`` of the key ``name`` does not meet; empty if there is none.

    ``is_option``: the number is an argument of a function, which knows its own bounds.
    """
    if name.endswith("_s"):
        if value > _MAX_SECONDS:
            return f"at most {_MAX_SECONDS} seconds"
        least = _MIN_TIMEOUT_S if name.endswith("_timeout_s") else _MIN_SECONDS
        return f"0 or at least {least} seconds" if 0 < value < least else ""
    if is_option:
        largest: float = _MAX_INT if isinstance(value, int) else _MAX_FLOAT
    else:
        largest = next((limit for ending, limit in _LARGEST.items() if name.endswith(ending)), _LARGEST_OTHER)
    if abs(value) > largest:
        return f"a number of at most {largest:,} in size"
    if is_option:
        return ""
    return f"0 or a number of at least {_SMALLEST:g} in size" if 0 < abs(value) < _SMALLEST else ""


def text_expected(name: str, text: str) -> str:
    """Return the expectation that ``text`` of the key ``name`` does not meet; empty if there is none, or no text."""
    if not is_writable(text):
        return "text that can be written as UTF-8, without NUL"
    if name in _TEXTS:
        is_text = len(text) <= _MAX_TEXT and text.replace("\n", "").replace("\t", "").isprintable()
        return "" if is_text else f"at most {_MAX_TEXT} characters without control characters"
    if not is_one_line(text):
        return f"one line of at most {_MAX_PATH} printable characters, without blanks at its ends"
    if not text:
        return ""
    if (name == "urls_file" and "://" in text) or (name == _FOLDER_OR_SERVER and text.startswith(("http://", "https://"))):
        return ""  # an address: its check is the servers'
    if name.endswith(_PATHS) or name == _FOLDER_OR_SERVER:
        return _path_expected(text)
    if name == "host" and not is_host(text):
        return "a host name or an IP address, without a port"
    if name == "mlflow_uri" and text.partition(":")[0].partition("+")[0] not in _STORES:
        return f"the address of a store (a text that begins with {', '.join(_STORES)} and a colon)"
    return ""


def is_writable(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # a lone surrogate: bytes of the command line that are not UTF-8
        return False


def is_one_line(text: str) -> bool:
    return text.isprintable() and text == text.strip() and len(text) <= _MAX_PATH


def _path_expected(text: str) -> str:
    if text.startswith("~") or "$" in text:
        return "a path without ~ and $, which only a shell replaces"
    if "://" in text:
        return "a path on this machine, not an address; download it, or mount the store"
    if any(len(part.encode()) > _MAX_NAME for part in PurePath(text).parts):
        return f"names of at most {_MAX_NAME} bytes between two /"
    place = os.path.abspath(text)
    is_special = any(place == folder or place.startswith(f"{folder}/") for folder in _NO_DISKS)
    if is_special and not place.startswith(f"{_ON_DISK}/"):
        return f"a path on a disk: {', '.join(_NO_DISKS)} hold no files"
    return ""
