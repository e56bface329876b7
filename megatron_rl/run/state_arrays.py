"""Lists and objects with arrays in them, as JSON and one flat array per dtype: what a checkpoint of the driver is made of.

In the JSON an array is ``{"__array__": [dtype, start, length]}``, its place in the flat array of its dtype. Thousands of
responses are then a few large files and some lines each, not a number of JSON per token.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

_MARK = "__array__"
_NESTS = (dict, list, tuple, np.ndarray)


def flatten_state(nest: Any) -> tuple[Any, dict[str, list[np.ndarray]]]:
    """(JSON-ready copy, by the name of each dtype the arrays that back to back are its flat array); arrays are shared."""
    parts: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, int] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, _NESTS):
            return value  # most are
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if not isinstance(value, np.ndarray):
            return [plain(inner) for inner in value]
        name = _name(value.dtype)
        start = sizes.get(name, 0)
        parts.setdefault(name, []).append(value)
        sizes[name] = start + len(value)
        return {_MARK: [name, start, len(value)]}

    return plain(nest), parts


def unflatten_state(nest: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The inverse of ``flatten_state``, with lists for tuples. ValueError for a place outside the flat arrays."""
    if isinstance(nest, list):
        return [unflatten_state(inner, arrays) for inner in nest]
    if not isinstance(nest, dict):
        return nest
    match nest.get(_MARK):
        case [str(name), int(start), int(length)] if len(nest) == 1:
            if name not in arrays or not 0 <= start <= start + length <= len(arrays[name]):
                raise ValueError(f"{length} entries from {start} on are not among the {name} that were saved")
            # A copy: a part would hold all of them in memory.
            return arrays[name][start : start + length].copy()
    return {key: unflatten_state(inner, arrays) for key, inner in nest.items()}


@cache
def _name(dtype: np.dtype) -> str:
    """numpy puts it together anew each time."""
    return dtype.name
