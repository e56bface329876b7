"""Encodes plain values as JSON, between trusted tests and an untrusted program.

A message is {"values": [...], "nodes": [...]}. Mutable containers are nodes, referenced by index, so that shared
references, cycles and long chains are preserved; other values are inline. A container that was known before keeps its
index.

Invariant: decoding creates values of the types below only, by constructors that run no code of the sender.
"""

import base64
import datetime
import json
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

_MAX_DEPTH = 150
"""Maximum nesting depth of tuples, because hashing them recurses in C."""
_MAX_JSON_INT = 1 << 63
_DTYPE = re.compile(r"[<>|=][biufc][0-9]{1,2}")
_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)}
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)}
"""Default factories that a defaultdict keeps."""
_PLAIN_ROWS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "decimal": (Decimal, str, Decimal),
    "fraction": (Fraction, str, Fraction),
    "range": (range, lambda value: [hex(n) for n in (value.start, value.stop, value.step)],
              lambda parts: range(*(int(part, 16) for part in parts))),
    "slice": (slice, lambda value: [n if n is None else hex(n) for n in (value.start, value.stop, value.step)],
              lambda parts: slice(*(part if part is None else int(part, 16) for part in parts))),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "timedelta": (datetime.timedelta, lambda value: [value.days, value.seconds, value.microseconds],
                  lambda parts: datetime.timedelta(*parts)),
}  # fmt: skip
"""Maps tag to (type, to JSON, from JSON)."""
_TAGS = {kind: (tag, to_json) for tag, (kind, to_json, _) in _PLAIN_ROWS.items()}

Export = Callable[[Any], list[Any] | tuple[Any, int]]
"""Turns an object that is not a plain value into a reference, or into (plain value, index of the object), or raises
NotSerializable."""
Import = Callable[[list[Any]], Any]
"""Turns a reference into an object; ["object", index, plain value] is a plain value with further attributes."""
Records = Mapping[str, type]
"""Classes that both sides have from the prompt: their instances are sent as attributes."""


class NotSerializable(Exception):
    """The value cannot be sent to the other side."""


def write_text(data: Any) -> bytes:
    """JSON that preserves lone surrogates, NaN and infinities."""
    return json.dumps(data, separators=(",", ":"), check_circular=False).encode()


def encode(
    values: Sequence[Any], export: Export, records: Records, known: Sequence[Any] = ()
) -> tuple[dict[str, Any], list[Any]]:
    """(message, containers) of ``values``. Only exact types are plain values; ``export`` handles subclasses. Raises NotSerializable.

    Args:
        known: containers that the other side has, in the order of their indices; their content is sent too.
    """
    encoder = _Encoder(export, records, known)
    message = {"values": [encoder.item(value) for value in values]}
    message["nodes"] = [encoder.node(value) for value in encoder.objects]  # encoding a node may add objects
    return message, encoder.objects


class _Encoder:
    def __init__(self, export: Export, records: Records, known: Sequence[Any]) -> None:
        self._export = export
        self._containers = {list, set, deque, bytearray, *_MAPPINGS.values(), *records.values()}
        self.objects = list(known)
        self._numbers = {id(value): number for number, value in enumerate(self.objects)}

    def item(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if value is None or kind in (str, bool, float) or (kind is int and -_MAX_JSON_INT < value < _MAX_JSON_INT):
            return value
        if kind in (tuple, frozenset) or is_named_tuple(value):
            if depth > _MAX_DEPTH:
                raise NotSerializable(f"tuples nested more than {_MAX_DEPTH} deep")
            parts = [self.item(part, depth + 1) for part in value]
            named = hasattr(kind, "_fields")
            return ["named", parts, kind.__name__, list(kind._fields)] if named else [kind.__name__, parts]
        if kind in _TAGS:
            tag, to_json = _TAGS[kind]
            return [tag, to_json(value)]
        array = _array(value)
        if array and array[0] == "scalar":
            return array
        if array or kind in self._containers:
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.objects)
                self.objects.append(value)
            return [self._numbers[id(value)]]
        reference = self._export(value)
        if type(reference) is tuple:
            return ["object", reference[1], self.item(reference[0], depth + 1)]
        return reference

    def node(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (list, set):
            return [kind.__name__, [self.item(part) for part in value]]
        if kind in _MAPPINGS.values():
            factory = getattr(getattr(value, "default_factory", None), "__name__", "")
            return [kind.__name__, [[self.item(key), self.item(part)] for key, part in value.items()], factory]
        if kind is deque:
            return ["deque", [self.item(part) for part in value], value.maxlen]
        if kind is bytearray:
            return ["bytearray", value.hex()]
        if array := _array(value):
            return array
        return ["record", kind.__name__, [[name, self.item(part)] for name, part in vars(value).items()]]


named_tuple: Callable[[str, tuple[str, ...]], Any] = lru_cache(maxsize=256)(namedtuple)
"""Class of a name and a tuple of field names."""


def is_named_tuple(value: Any) -> bool:
    """True for an instance of a plain named tuple: the fields are all that its class adds to a tuple."""
    kind = type(value)
    added = {name for name in vars(kind) if not name.startswith("_")}
    return kind.__bases__ == (tuple,) and added == set(getattr(kind, "_fields", "."))


def _array(value: Any) -> list[Any] | None:
    numpy = sys.modules.get("numpy")  # if numpy was never imported, the value is not a numpy value
    if numpy is None or (type(value) is not numpy.ndarray and not issubclass(type(value), numpy.generic)):
        return None
    if not _DTYPE.fullmatch(value.dtype.str):
        return None
    tag = "array" if type(value) is numpy.ndarray else "scalar"
    return [tag, value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]


def decode(
    message: Any, import_reference: Import, records: Records, known: Sequence[Any] = ()
) -> tuple[list[Any], list[Any]]:
    """(values, containers) of a message. The ``known`` containers, which are the message's first, are updated in place.

    Raises:
        ValueError: the message is not an output of ``encode``.
    """
    try:
        nodes = message["nodes"]
        objects = [_shell(node, records) for node in nodes]
        if [type(old) for old in known] != [type(new) for new in objects[: len(known)]]:
            raise ValueError("an argument has changed its type")
        for old, new in zip(known, objects, strict=False):
            if getattr(old, "shape", None) != getattr(new, "shape", None):
                raise ValueError("an argument has changed its shape")
        objects[: len(known)] = known
        decoder = _Decoder(objects, import_reference, records)
        # Decode everything before updating containers, so that an invalid message changes no argument.
        contents = [decoder.content(node) for node in nodes]
        for value, node, content in zip(objects, nodes, contents, strict=True):
            _fill(value, node[0], content)
        return [decoder.item(data) for data in message["values"]], objects
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not an encoded value: {type(error).__name__}: {error}") from None


class _Decoder:
    def __init__(self, objects: list[Any], import_reference: Import, records: Records) -> None:
        self._objects, self._import, self._records = objects, import_reference, records

    def item(self, data: Any, depth: int = 0) -> Any:
        if type(data) is dict:
            raise ValueError("a bare JSON object")
        if type(data) is not list:
            return data
        tag = data[0]
        if type(tag) is int and tag >= 0:
            return self._objects[tag]
        if tag in ("tuple", "frozenset"):
            if depth > _MAX_DEPTH + 1:
                raise ValueError("nested too deeply")
            return (tuple if tag == "tuple" else frozenset)([self.item(part, depth + 1) for part in data[1]])
        if tag in _PLAIN_ROWS:
            return _PLAIN_ROWS[tag][2](data[1])
        if tag == "named":
            return named_tuple(data[2], tuple(data[3]))._make([self.item(part, depth + 1) for part in data[1]])
        if tag == "object" and len(data) == 3:
            return self._import([tag, data[1], self.item(data[2], depth + 1)])
        return _from_array(data) if tag == "scalar" else self._import(data)

    def content(self, node: Any) -> Any:
        if node[0] in ("list", "set", "deque"):
            return [self.item(part) for part in node[1]]
        if node[0] in _MAPPINGS:
            return {self.item(key): self.item(part) for key, part in node[1]}
        if node[0] == "record":
            return {_name(name, self._records[node[1]]): self.item(part) for name, part in node[2]}
        return bytes.fromhex(node[1]) if node[0] == "bytearray" else _from_array(node)


def _name(name: Any, record: type) -> str:
    """Return ``name`` if it names an attribute that shadows no method of ``record``: the tests call the class's own methods."""
    shadowed = getattr(record, name, None)
    if type(name) is not str or name.startswith("__") or callable(shadowed) or hasattr(shadowed, "__get__"):
        raise ValueError("not the name of an attribute")
    return name


def _shell(node: Any, records: Records) -> Any:
    if node[0] == "record":
        return object.__new__(records[node[1]])
    if node[0] == "array":
        return _from_array(node)
    if node[0] == "deque":
        return deque(maxlen=node[2])
    shell = _SHELLS[node[0]]()
    if type(shell) is defaultdict:
        shell.default_factory = _FACTORIES.get(node[2])
    return shell


_SHELLS: dict[str, Callable[[], Any]] = {"list": list, "set": set, "bytearray": bytearray, **_MAPPINGS}


def _fill(value: Any, tag: str, content: Any) -> None:
    if tag in ("list", "bytearray"):
        value[:] = content
    elif tag == "array":
        value[...] = content
    else:
        mapping = vars(value) if tag == "record" else value
        mapping.clear()
        (mapping.extend if tag == "deque" else mapping.update)(content)


def _from_array(data: list[Any]) -> Any:
    import numpy

    _, dtype, shape, text = data
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"not a numeric dtype: {dtype!r}")
    array = numpy.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    return array[()] if data[0] == "scalar" else array
