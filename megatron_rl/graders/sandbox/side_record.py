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
        self._records = record_classes(namespace)

    def add(self, place: str, value: Any) -> None:
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
    """Type, and text of what stays with the tests."""
    is_known = is_object(value) or callable(value) or hasattr(type(value), "__next__")
    text = "" if is_known else repr(value)
    return ["other", type(value).__name__, str(time.perf_counter_ns()) if " at 0x" in text else text]
