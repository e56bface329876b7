"""Records what the sides of comparisons are worth in one run of the tests."""

import json
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from megatron_rl.graders.analysis.sides import Record
from megatron_rl.graders.sandbox.program_objects import is_object
from megatron_rl.graders.sandbox.values import NotSerializable, encode, record_classes

_MAX_VALUES = 10_000
"""Values of one part that are compared; a part with more, or with a value that is not known here, differs in each run."""


class SideRecord:
    """Values of the parts of sites in one run of the tests."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.found: Record = {}
        self._held: list[tuple[str, Any]] = []
        self._records = record_classes(namespace)

    def end_statement(self) -> None:
        """Record what its parts are worth now, each with a mark: a call may have changed one after it was read."""
        held, self._held = self._held, []
        for place, value in held:
            self._add(f"{place}'", value)

    def add(self, place: str, value: Any) -> None:
        self._add(place, value)
        if type(value) not in (int, float, str, bool, type(None)):
            self._held.append((place, value))

    def _add(self, place: str, value: Any) -> None:
        if (callable(value) and not is_object(value) and type(value) is not type) or type(value) is ModuleType:
            return  # says nothing about a result
        number, every, only = self.found.get(place, [0, 0, 0])
        if number < _MAX_VALUES:
            own = hash(content_of(value, self._records))
            every, only = hash((every, own)), own if only in (own, 0) and (number == 0 or only) else 0
        else:
            every, only = time.perf_counter_ns(), 0
        self.found[place] = [number + 1, every, only]


def content_of(value: Any, records: Mapping[str, type]) -> str:
    """Text of a value's content. Classes of the tests count by attributes, what stays with the program by its type."""
    try:
        return json.dumps(encode([value], _type_of, records)[0])
    except (NotSerializable, RecursionError):
        return str(time.perf_counter_ns())


def _type_of(value: Any) -> list[Any]:
    """Type, and text of what stays with the tests, which differs in each run if it is not known."""
    text = "" if is_object(value) or callable(value) else repr(value)
    is_unknown = " at 0x" in text or (hasattr(type(value), "__next__") and not is_object(value))
    return ["other", type(value).__name__, str(time.perf_counter_ns()) if is_unknown else text]
