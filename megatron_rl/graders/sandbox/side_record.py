"""Records what the sides of comparisons are worth in one run of the tests."""

import json
from collections.abc import Mapping
from typing import Any

from megatron_rl.graders.analysis.sides import Record
from megatron_rl.graders.sandbox.values import NotSerializable, encode, record_classes

_MAX_VALUES = 2_000
"""Values of one part that count."""


class SideRecord:
    """Values of the parts of sites in one run of the tests."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.found: Record = {}
        self._namespace = namespace

    def add(self, place: str, value: Any) -> None:
        number, every, only = self.found.get(place, [0, 0, 0])
        if number < _MAX_VALUES:
            own = hash(self._text(value))
            every, only = hash((every, own)), own if only in (own, 0) and (number == 0 or only) else 0
        self.found[place] = [number + 1, every, only]

    def _text(self, value: Any) -> str:
        """Text of a value's content. Classes of the tests count by attributes, what stays with the program by its type."""
        try:
            return json.dumps(encode([value], lambda each: ["other", type(each).__name__], record_classes(self._namespace))[0])
        except (NotSerializable, RecursionError):
            return type(value).__name__
