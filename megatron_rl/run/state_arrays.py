"""Converts nested lists and objects with arrays to JSON and one flat array per dtype: the format of a driver checkpoint.

In the JSON an array is ``{"__array__": [dtype, start, length]}``, its span in the flat array of its dtype.
Thousands of responses thus become a few large files and some lines each, not a JSON number per token.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

_MARK = "__array__"
_NESTS = (dict, list, tuple, np.ndarray)


def flatten_state(nest: Any) -> tuple[Any, dict[str, list[np.ndarray]]]:
    """Returns (JSON-ready copy, arrays by dtype name). The arrays of a dtype, concatenated, are its flat array. Arrays are not copied."""
    parts: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, int] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, _NESTS):
            return value  # the most frequent case
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
    """Inverse of ``flatten_state``, with lists instead of tuples. Raises ValueError for a span outside the flat arrays."""
    if isinstance(nest, list):
        return [unflatten_state(inner, arrays) for inner in nest]
    if not isinstance(nest, dict):
        return nest
    match nest.get(_MARK):
        case [str(name), int(start), int(length)] if len(nest) == 1:
            if name not in arrays or not 0 <= start <= start + length <= len(arrays[name]):
                raise ValueError(f"{length} entries from {start} on are outside the {name} arrays that were saved")
            # Copy, because a view would keep the whole flat array in memory.
            return arrays[name][start : start + length].copy()
    return {key: unflatten_state(inner, arrays) for key, inner in nest.items()}


@cache
def _name(dtype: np.dtype) -> str:
    """The dtype's name; cached, because numpy builds the string on every access."""
    return dtype.name
