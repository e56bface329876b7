"""Encodes plain values as JSON, between trusted tests and an untrusted program.

A message is {"values": [...], "nodes": [...]}. Mutable containers are nodes, referenced by index, so that shared
references, cycles and long chains are preserved; other values are inline. A container that was known before keeps its
index; its node is null if it has not changed.

Invariant: decoding creates values of the types below only, by constructors that run no code of the sender.
"""

import base64
import datetime
import dis
import json
import operator
import re
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from random import Random
from types import SimpleNamespace
from typing import Any

from megatron_rl.graders.analysis.blind_spots import EXACT, WORDS, Notice, look

_MAX_DEPTH = 150
"""Maximum nesting depth of tuples, because hashing them recurses in C."""
_MAX_JSON_INT = 1 << 63
_DTYPE = re.compile(r"[<>|=](?:[biufc][0-9]{1,2}|[US][1-9][0-9]{0,4})")
_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)}
_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, bytes, complex, frozenset, bytearray, type(None))
}
"""Classes that are plain values, and default factories that a defaultdict keeps."""
_VIEWS: dict[str, Callable[[list[Any]], Any]] = {
    "dict_keys": lambda parts: dict.fromkeys(parts).keys(),
    "dict_values": lambda parts: dict(enumerate(parts)).values(),
    "dict_items": lambda parts: dict(parts).items(),
}
PLAIN_ROWS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
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
    "path": (PurePosixPath, str, PurePosixPath),
    "file": (type(Path()), str, Path),
}  # fmt: skip
"""Maps tag to (type, to JSON, from JSON)."""
_TAGS = {kind: (tag, to_json) for tag, (kind, to_json, _) in PLAIN_ROWS.items()}

Export = Callable[[Any], list[Any] | tuple[Any, int]]
"""Turns an object that is not a plain value into a reference, or into (plain value, index of the object), or raises
NotSerializable."""
Import = Callable[[list[Any]], Any]
"""Turns a reference into an object; ["object", index, plain value] is a plain value with further attributes."""
Records = Mapping[str, type]
"""Classes that both sides have from the prompt: their instances are sent as attributes, members of enumerations by name."""
Snapshot = list[Any] | tuple[Any, ...]
"""Content of a container at some time, see ``snapshot``."""


class NotSerializable(Exception):
    """The value cannot be sent to the other side."""


def write_text(data: Any) -> bytes:
    """JSON that preserves lone surrogates, NaN and infinities."""
    return json.dumps(data, separators=(",", ":"), check_circular=False).encode()


def encode(
    values: Sequence[Any],
    export: Export,
    records: Records,
    known: Sequence[Any] = (),
    snapshots: Sequence[Snapshot] = (),
) -> tuple[dict[str, Any], list[Any]]:
    """(message, containers) of ``values``. Only exact types are plain values; ``export`` handles subclasses. Raises NotSerializable.

    Args:
        known: containers that the other side has, in the order of their indices; what has changed in them is sent too.
        snapshots: content of the known containers that the other side has.
    """
    encoder = _Encoder(export, records, known)
    message = {"values": [encoder.item(value) for value in values]}
    same = {number for number, old in enumerate(snapshots) if is_unchanged(known[number], old)}
    # Encoding a node may add objects.
    message["nodes"] = [None if number in same else encoder.node(value) for number, value in enumerate(encoder.objects)]
    return message, encoder.objects


def snapshot(container: Any) -> Snapshot:
    """Content of a container: its parts, to be compared by identity, or a tuple of plain values."""
    if type(container) in (bytearray, array):
        return (bytes(container),)
    if type(container) is Random:
        return (container.getstate(),)
    if data := _array(container):
        return tuple(map(str, data))
    content = container if isinstance(container, list | set | deque | dict) else vars(container)
    return [*content, *content.values()] if isinstance(content, dict) else list(content)


def is_unchanged(container: Any, old: Snapshot) -> bool:
    new = snapshot(container)
    return new == old if type(old) is tuple else len(new) == len(old) and all(map(operator.is_, new, old))


class _Encoder:
    def __init__(self, export: Export, records: Records, known: Sequence[Any]) -> None:
        self._export = export
        self._records = {kind for kind in records.values() if not issubclass(kind, Enum | tuple)}
        self._members = {kind for kind in records.values() if issubclass(kind, Enum)}
        self._tuples = {kind for kind in records.values() if issubclass(kind, tuple)}
        self._containers = {list, set, deque, bytearray, array, Random, SimpleNamespace, *_MAPPINGS.values(), *self._records}
        self.objects = list(known)
        self._numbers = {id(value): number for number, value in enumerate(self.objects)}

    def item(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if value is None or kind in (str, bool, float) or (kind is int and -_MAX_JSON_INT < value < _MAX_JSON_INT):
            return value
        if kind in (tuple, frozenset) or kind in self._tuples or is_named_tuple(value):
            if depth > _MAX_DEPTH:
                raise NotSerializable(f"tuples nested more than {_MAX_DEPTH} deep")
            iterate: Any = frozenset.__iter__ if kind is frozenset else tuple.__iter__  # not the class's own
            parts = [self.item(part, depth + 1) for part in iterate(value)]
            named = hasattr(kind, "_fields")
            return ["named", parts, kind.__name__, list(kind._fields)] if named else [kind.__name__, parts]
        if kind in _TAGS:
            tag, to_json = _TAGS[kind]
            return [tag, to_json(value)]
        if built_in := self._built_in(value, depth):
            return built_in
        data = _array(value)
        if data and data[0] == "scalar":
            return data
        if data or kind in self._containers:
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.objects)
                self.objects.append(value)
            return [self._numbers[id(value)]]
        reference = self._export(value)
        if type(reference) is tuple:
            return ["object", reference[1], self.item(reference[0], depth + 1)]
        return reference

    def _built_in(self, value: Any, depth: int) -> list[Any]:
        """The view of a dict, the built-in type or the member of an enumeration; [] if ``value`` is something else."""
        kind = type(value)
        if kind.__name__ in _VIEWS and kind.__module__ == "builtins":
            return [kind.__name__, [self.item(part, depth + 1) for part in value]]
        if kind is type and value in _FACTORIES.values():
            return ["type", value.__name__]
        return ["member", kind.__name__, value.value if isinstance(value, Flag) else value.name] if kind in self._members else []

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
        if kind is array:
            return ["typed", value.tobytes().hex(), value.typecode]
        if kind is Random:
            return ["random", value.getstate()]
        if data := _array(value):
            return data
        kept = [(name, part) for name, part in vars(value).items() if not isinstance(getattr(kind, name, None), cached_property)]
        attributes = [[name, self.item(part)] for name, part in kept]
        return ["record", kind.__name__, attributes] if kind in self._records else ["namespace", attributes]


named_tuple: Callable[[str, tuple[str, ...]], Any] = lru_cache(maxsize=256)(namedtuple)
"""Class of a name and a tuple of field names."""


def is_named_tuple(value: Any) -> bool:
    """True for an instance of a plain named tuple: the fields are all that its class adds to a tuple."""
    kind = type(value)
    added = {name for name in vars(kind) if not name.startswith("_")}
    return kind.__bases__ == (tuple,) and added == set(getattr(kind, "_fields", "."))


def _array(value: Any) -> list[Any] | None:
    numpy = sys.modules.get("numpy")  # if numpy was never imported, the value is not a numpy value
    is_array = numpy is not None and type(value) in (numpy.ndarray, numpy.memmap)
    if numpy is None or not (is_array or issubclass(type(value), numpy.generic)):
        return None
    tag = "array" if is_array else "scalar"
    if not _DTYPE.fullmatch(value.dtype.str) or (tag == "scalar" and value.dtype.kind in "US"):
        return None
    return [tag, value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]


def decode(
    message: Any,
    import_reference: Import,
    records: Records,
    known: Sequence[Any] = (),
    notice: Notice | None = None,
) -> tuple[list[Any], list[Any]]:
    """(values, containers) of a message. The ``known`` containers, which are the message's first, are updated in place.

    Args:
        notice: Called with what is noticed of the values (``blind_spots.DOUBTS``), and with "nothing" and "empty array".

    Raises:
        ValueError: the message is not an output of ``encode``.
    """
    try:
        known_nodes, new_nodes = message["nodes"][: len(known)], message["nodes"][len(known) :]
        objects = [*known, *(_shell(node, records) for node in new_nodes)]
        changed = [pair for pair in zip(known, known_nodes, strict=True) if pair[1] is not None]
        if any(_kind(value) != _kind(_shell(node, records)) for value, node in changed):
            raise ValueError("an argument has changed its type or its shape")
        decoder, others = _Decoder(objects, import_reference, records, notice), changed
        for value, node in zip(objects[len(known) :], new_nodes, strict=True):
            if node[0] == "record":  # first, because sets and keys hash it
                _fill(value, node[0], decoder.content(node))
            else:
                others.append((value, node))
        # Decode everything before updating known containers, so that an invalid message changes no argument.
        values, contents = [decoder.item(data) for data in message["values"]], [decoder.content(node) for _, node in others]
        for (value, node), content in zip(others, contents, strict=True):
            _fill(value, node[0], content)
        return values, objects
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not an encoded value: {type(error).__name__}: {error}") from None


class _Decoder:
    def __init__(self, objects: list[Any], import_reference: Import, records: Records, notice: Notice | None) -> None:
        self._objects, self._import, self._records = objects, import_reference, records
        self._notice = notice

    def item(self, data: Any, depth: int = 0) -> Any:
        if type(data) is dict:
            raise ValueError("a bare JSON object")
        if type(data) is not list:
            if (type(data) is float and not -EXACT < data < EXACT) or (type(data) is str and data in WORDS):
                self._look(data)
            return data
        tag = data[0]
        if type(tag) is int and tag >= 0:
            return self._objects[tag]
        if tag in ("tuple", "frozenset", "named"):
            if depth > _MAX_DEPTH + 1:
                raise ValueError("nested too deeply")
            make = self._named(data)._make if tag == "named" else tuple if tag == "tuple" else frozenset
            parts = [self.item(part, depth + 1) for part in data[1]]
            if tag == "named" and self._notice and any(map(callable, parts)):
                self._notice("method")
            return self._look(make(parts))
        return self._look(PLAIN_ROWS[tag][2](data[1])) if tag in PLAIN_ROWS else self._reference(data, tag, depth)

    def _reference(self, data: list[Any], tag: Any, depth: int) -> Any:
        if tag == "object" and len(data) == 3:
            return self._import([tag, data[1], self.item(data[2], depth + 1)])
        if tag in _VIEWS:
            return self._look(_VIEWS[tag]([self.item(part, depth + 1) for part in data[1]]))
        if tag == "type":
            return _FACTORIES[data[1]]
        if tag == "member":
            kind: Any = self._records[data[1]]
            return kind(data[2]) if issubclass(kind, Flag) and type(data[2]) is int else vars(kind)["_member_map_"][data[2]]
        return self._look(_from_array(data)) if tag == "scalar" else self._import(data)

    def _named(self, data: list[Any]) -> Any:
        """Class of a named tuple: the prompt's, if its fields are these."""
        own, fields = self._records.get(data[2], object), tuple(data[3])
        return own if issubclass(own, tuple) and getattr(own, "_fields", None) == fields else named_tuple(data[2], fields)

    def content(self, node: Any) -> Any:
        tag, content = node[:2]
        if tag in ("list", "set", "deque"):
            return [self.item(part) for part in self._look(content)]
        if tag in _MAPPINGS:
            if self._notice and node[2] and node[2] not in _FACTORIES:
                self._notice("subclass")
            found = {self.item(key): self.item(part) for key, part in self._look(content)}
            return self._look(Counter(found)) if tag == "Counter" else found
        if tag == "record":
            return {_name(name, self._records[content]): self.item(part) for name, part in node[2]}
        if tag == "namespace":
            return {_name(name, SimpleNamespace): self.item(part) for name, part in content}
        if tag == "random":
            return content[0], tuple(content[1]), content[2]
        if tag == "typed":
            return self._look(array(node[2], bytes.fromhex(content)))
        return self._look(bytes.fromhex(content) if tag == "bytearray" else _from_array(node))

    def _look(self, value: Any) -> Any:
        """``value``, of which is noticed what comparisons may be blind to."""
        if self._notice:
            look(value, self._notice)
        return value


def record_classes(namespace: Mapping[str, Any]) -> dict[str, type]:
    """Classes defined in a namespace, whose instances may be sent as their attributes (nodes of lists and trees)."""
    return {
        name: value
        for name, value in namespace.items()
        if issubclass(type(value), type) and value.__module__ == namespace["__name__"]  # asks no object of the program for its class
        if _is_record(value, namespace) or issubclass(value, Enum) or (value.__bases__ == (tuple,) and hasattr(value, "_fields"))
    }


def _is_record(kind: type, namespace: Mapping[str, Any]) -> bool:
    """True if instances have no state except attributes: ``kind`` and its bases are plain classes of the prompt."""
    bases = kind.__mro__[:-1]
    return kind.__dictoffset__ != 0 and all(type(base) is type and namespace.get(base.__name__) is base for base in bases)


def _name(name: Any, record: type) -> str:
    """Return ``name`` if it names an attribute of ``record`` that shadows only what the class's own methods or fields shadow:
    the tests call the class's own methods, which may read its constants."""
    shadowed = getattr(record, name, None)
    has_init = vars(record).get("__init__") or any("__init__" in vars(base) for base in record.__mro__[:-1])
    is_constant = shadowed is not None and has_init and name not in _own_attributes(record)
    if type(name) is not str or name.startswith("__") or callable(shadowed) or hasattr(shadowed, "__get__") or is_constant:
        raise ValueError("not the name of an attribute")
    return name


@lru_cache(maxsize=256)
def _own_attributes(record: type) -> frozenset[str]:
    """Names of the attributes that the methods of a class set, and fields of a dataclass."""
    codes = [code for base in record.__mro__ for each in vars(base).values() if (code := getattr(each, "__code__", None))]
    stored = {line.argval for code in codes for line in dis.get_instructions(code) if line.opname == "STORE_ATTR"}
    return frozenset(stored | set(getattr(record, "__dataclass_fields__", ())))


def _kind(container: Any) -> tuple[Any, ...]:
    return type(container), getattr(container, "shape", None), getattr(container, "typecode", None)


def _shell(node: Any, records: Records) -> Any:
    if node[0] == "record":
        return object.__new__(records[node[1]])
    if node[0] == "array":
        return _from_array(node)
    if node[0] in ("deque", "typed"):
        return deque(maxlen=node[2]) if node[0] == "deque" else array(node[2])
    shell = _SHELLS[node[0]]()
    if type(shell) is defaultdict:
        shell.default_factory = _FACTORIES.get(node[2])
    return shell


_SHELLS: dict[str, Callable[[], Any]] = {"list": list, "set": set, "bytearray": bytearray, "random": Random, "namespace": SimpleNamespace}
_SHELLS |= _MAPPINGS


def _fill(value: Any, tag: str, content: Any) -> None:
    if tag in ("list", "bytearray", "typed"):
        value[:] = content
    elif tag == "array":
        value[...] = content
    elif tag == "random":
        value.setstate(content)
    else:
        mapping = vars(value) if tag in ("record", "namespace") else value
        mapping.clear()
        (mapping.extend if tag == "deque" else mapping.update)(content)


def _from_array(data: list[Any]) -> Any:
    import numpy

    _, dtype, shape, text = data
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"not a numeric dtype: {dtype!r}")
    values = numpy.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    return values[()] if data[0] == "scalar" else values


def dress(plain: Any, handle: Any) -> Any:
    """``plain`` with the further attributes that the program's subclass has; operators run here, on the plain value. A
    container that can change comes without."""
    if not isinstance(plain, int | float | str | bytes | tuple):
        return plain
    kind: Any = _dressed(type(plain))  # type: ignore[arg-type]
    dressed = kind._make(plain) if hasattr(plain, "_fields") else kind(plain)
    vars(dressed)["_handle"] = handle
    return dressed


@lru_cache(maxsize=256)
def _dressed(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"__getattr__": _attribute})


def _attribute(value: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(vars(value)["_handle"], name)
