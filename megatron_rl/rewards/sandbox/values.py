"""Python values as JSON, between a referee that is trusted and a program that is not.

Invariants: decoding builds only values of the types below, so a decoded value has no behaviour of the sender's; a value
of any other type, subclasses of plain ones included, travels as a reference to the object, which stays where it is.
"""

import datetime
import json
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_JSON_TYPES = {str, bool, type(None), float}
_MAX_JSON_INT = 1 << 63
_DTYPE = re.compile(r"[<>|=][biufcSU][0-9]{1,4}")

Export = Callable[[Any], list[Any]]
"""Turns an object that is no plain value into a reference, or raises Unsendable."""
Import = Callable[[list[Any]], Any]
"""Turns a reference of the other side into something usable."""


class Unsendable(Exception):
    """A value that cannot be given to the other side."""


def encode(value: Any, export: Export) -> Any:
    """``value`` as JSON values: scalars as they are, everything else as [tag, ...].

    Raises:
        Unsendable: nested too deeply, or refused by ``export``.
    """
    try:
        return _encode(value, export)
    except RecursionError:
        raise Unsendable("a value that is nested too deeply, or contains itself") from None


def _encode(value: Any, export: Export) -> Any:
    kind = type(value)  # not isinstance: a subclass may behave differently, so it stays where it is
    if kind in _JSON_TYPES:
        return value
    if kind is int:
        return value if -_MAX_JSON_INT < value < _MAX_JSON_INT else ["int", hex(value)]
    if kind in _LEAVES:
        return [kind.__name__.lower(), *_LEAVES[kind](value)]
    if kind in _SEQUENCES:
        return [kind.__name__, [_encode(item, export) for item in value]]
    if kind in _MAPPINGS:
        return ["dict", [[_encode(key, export), _encode(item, export)] for key, item in value.items()]]
    if kind in _PARTS:
        return [kind.__name__.lower(), *(_encode(part, export) for part in _PARTS[kind](value))]
    if kind is deque:
        return ["deque", [_encode(item, export) for item in value], value.maxlen]
    numpy = sys.modules.get("numpy")  # without an import of it there is no value of its types
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and _DTYPE.fullmatch(value.dtype.str):
        tag = "ndarray" if isinstance(value, numpy.ndarray) else "generic"
        return [tag, _encode(value.tolist(), export), value.dtype.str]
    return export(value)


def plain_base(value: Any) -> Any:
    """The value of a plain type that an instance of a subclass holds; None if its class has no plain base."""
    for base, copy in _BASES:
        if isinstance(value, base):
            return copy(value)
    return None


def decode(data: Any, import_reference: Import) -> Any:
    """What ``encode`` was given.

    Raises:
        ValueError: no output of ``encode``.
    """
    try:
        return _decode(data, import_reference)
    except (TypeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not an encoded value: {error}") from error


def _decode(data: Any, import_reference: Import) -> Any:
    if not isinstance(data, list):
        return data
    tag, *parts = data
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](_decode(item, import_reference) for item in parts[0])
    if tag == "dict":
        return {_decode(key, import_reference): _decode(item, import_reference) for key, item in parts[0]}
    if tag in _PLAIN:
        return _PLAIN[tag](*parts)
    if tag in ("range", "fraction"):
        return (range if tag == "range" else Fraction)(*(_decode(part, import_reference) for part in parts))
    if tag == "deque":
        return deque((_decode(item, import_reference) for item in parts[0]), parts[1])
    if tag in ("ndarray", "generic"):
        import numpy

        if not _DTYPE.fullmatch(parts[1]):
            raise ValueError(f"not a plain dtype: {parts[1]!r}")
        array = numpy.array(_decode(parts[0], import_reference), dtype=parts[1])
        return array if tag == "ndarray" else array[()]
    return import_reference(data)


_LEAVES: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    bytes: lambda value: (value.hex(),),
    bytearray: lambda value: (value.hex(),),
    complex: lambda value: (value.real, value.imag),
    Decimal: lambda value: (str(value),),
    datetime.date: lambda value: (value.isoformat(),),
    datetime.time: lambda value: (value.isoformat(),),
    datetime.datetime: lambda value: (value.isoformat(),),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
}
"""By type, JSON values that say all of it."""
_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    range: lambda value: (value.start, value.stop, value.step),
    Fraction: lambda value: (value.numerator, value.denominator),
}
"""By type, values that are encoded themselves."""
_SEQUENCES = {list, tuple, set, frozenset}
_MAPPINGS = {dict, OrderedDict, defaultdict, Counter}
"""They travel as a dict; each equals a dict with the same items."""
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__index__),
    (float, float.__float__),
    (str, str.__str__),
    (list, lambda value: [*list.__iter__(value)]),
    (tuple, lambda value: (*tuple.__iter__(value),)),
    (dict, lambda value: dict(dict.items(value))),
    (set, lambda value: {*set.__iter__(value)}),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
)
_CONTAINERS: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_PLAIN: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": complex,
    "decimal": Decimal,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "timedelta": datetime.timedelta,
}


def write_text(data: Any) -> bytes:
    """JSON of encoded values; lone surrogates, NaN and infinities survive."""
    return json.dumps(data, separators=(",", ":"), check_circular=False).encode()


def read_text(text: bytes) -> Any:
    """Raises ValueError: no JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
