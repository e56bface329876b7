"""Values that comparisons are blind to: they pass tests without being right, as nan passes ``not abs(x - 4) > 1e-6``.

Such a value is noticed where the test process decodes it. Tests in which it would show are listed as expecting it.
"""

import ast
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from megatron_rl.graders.analysis.value_flow import called

Notice = Callable[[str], object]
EXACT = 2.0**53
"""Floats from here on equal other integers, and what is added to them may be lost."""
DOUBTS = {
    "nan": "the program gave nan, which is neither below nor above a limit",
    "inf": "the program gave an infinite number, which a relative limit does not exclude",
    "method": "the program gave a named tuple in which a type stands for a method",
    "aliased": "the program changed later what it had given: an argument as its result, or the list of a with to what it was handed",
    "zeros": "the program gave a Counter of zeros, which equal nothing",
    "large": "the program gave floats so large that the sums which tests compare lose what they add",
    **dict.fromkeys(("narrow", "rounded"), "the program gave numbers of numpy that round or overflow in comparisons"),
}
"""Maps what is noticed, unless the tests expect it, to why the tests cannot judge it. "rounded" are float64, "narrow" other numbers of
numpy."""
WORDS = {"": "nothing", **dict.fromkeys(("nan", "NaN", "NAN"), "nan"), **dict.fromkeys(("inf", "-inf", "Infinity", "-Infinity"), "inf")}
"""Texts that are noticed: empty, or a number for those who read it."""
NARROW = re.compile(r"\b(?:u?int(?:8|16)|float16|half|dtype)\b")
_MENTIONED = re.compile(rf"{NARROW.pattern}|\b(?:float32|complex64|single)\b")
_NOT_FINITE = re.compile(r"nan(?=\b)|inf(?=inity\b|\b)", re.IGNORECASE)
_INTEGERS = set("eval factorial comb perm prod pow int round ceil floor trunc sum reduce cumsum cumprod loads load open read".split())
"""Functions that may give large integers."""
_NARROW_TYPES = "i1 u1 i2 u2 f2 f4 c8".split()
_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
_MAX_DIMENSIONS = 64
"""Maximum number of dimensions of an array."""


def expected_in(text: str, prompt: str, nodes: list[ast.AST], compares_sums: bool) -> set[str]:
    """Values that show in the tests, by their text and all nodes of their source."""
    found = {word.lower() for word in _NOT_FINITE.findall(text)}
    found |= {"narrow", "rounded"} if _MENTIONED.search(prompt + text) else set()
    found |= set() if any(map(_may_be_large, nodes)) else {"rounded"}
    return found | (set() if compares_sums else {"large"})


def _may_be_large(node: ast.AST) -> bool:
    """True for an expression whose value may be an integer above 2**53."""
    if isinstance(node, ast.BinOp | ast.AugAssign):
        operands = [getattr(node, "left", None), getattr(node, "right", getattr(node, "value", None))]
        is_float = any(isinstance(each, ast.Constant) and isinstance(each.value, float) for each in operands)
        return isinstance(node.op, ast.Add | ast.Mult | ast.Pow | ast.LShift) and not is_float
    is_integer = isinstance(node, ast.Constant) and isinstance(node.value, int)
    return (is_integer and abs(node.value) >= EXACT) or called(node) in _INTEGERS  # type: ignore[attr-defined]


def look(value: Any, notice: Notice) -> None:
    """Notice what comparisons may be blind to in a value; of a container only whether it is empty."""
    if type(value).__module__ == "numpy":
        _look_at_array(value, notice)
    elif isinstance(value, complex):
        look(value.real, notice)
        look(value.imag, notice)
    elif isinstance(value, float | Decimal):
        if not math.isfinite(value):
            notice("nan" if math.isnan(value) else "inf")
        elif abs(float(value)) >= EXACT:
            notice("large")
    elif isinstance(value, str):
        notice(WORDS[value])
    elif isinstance(value, Counter) and not all(count > 0 for count in value.values()):
        notice("zeros")
    elif hasattr(value, "__len__") and not value:
        notice("nothing")


def _look_at_array(value: Any, notice: Notice) -> None:
    _watch_arithmetic(notice)
    kind, size = value.dtype.kind, abs(value) if value.dtype.kind in "fci" else value
    if kind in "fc" and not sys.modules["numpy"].isfinite(value).all():
        notice("nan" if bool((value != value).any()) else "inf")
    if value.dtype.str[1:] in _NARROW_TYPES or (kind in "iufc" and _is_rounded(value)):
        notice("rounded" if value.dtype.str[1:] == "f8" else "narrow")
    if kind == "f" and bool((size >= EXACT).any()):
        notice("large")
    if value.size == 0:
        notice("empty array")


def shape_of(value: Any) -> tuple[bool, list[int]]:
    """(whether a value is, or holds, an array; the sizes of its dimensions above 1)."""
    sizes: list[int] = []
    while type(value) in (list, tuple) and len(sizes) < _MAX_DIMENSIONS:
        sizes.append(len(value))
        value = value[0] if value else 0
    is_array = type(value).__module__ == "numpy"
    return is_array, [size for size in [*sizes, *(getattr(value, "shape", ()) if is_array else ())] if size != 1]


@lru_cache(maxsize=1)
def _watch_arithmetic(notice: Notice) -> None:
    """Notice what tests compute with numbers of numpy, which warn instead of raising."""
    sys.modules["numpy"].seterrcall(lambda _, kind: notice({1: "inf", 2: "narrow"}.get(kind, "nan")))
    sys.modules["numpy"].seterr(over="call", divide="call", invalid="call")


def _is_rounded(value: Any) -> bool:
    """True for numpy's numbers so large that they equal other integers, or that their products overflow unseen, as in arrays."""
    numpy, is_float, value = sys.modules["numpy"], value.dtype.kind in "fc", abs(value) if value.dtype.kind == "c" else value
    limit = 2.0 ** (numpy.finfo(value.dtype).nmant + 1) if is_float else 2.0**31
    return bool((is_float or value.ndim) and (((value >= limit) | (value <= -limit)) & numpy.isfinite(value)).any())


def asks_for_nothing(arguments: list[Any], depth: int = 0) -> bool:
    """True for a call with an argument that is 0 or empty, or holds a container that is."""
    for value in arguments:
        kind = type(value)
        is_zero = kind is int and value == 0 and not depth
        size = getattr(value, "size", 1) if kind.__module__ == "numpy" else len(value) if kind in _SIZED else not is_zero
        if not size or (kind in (list, tuple) and depth < _MAX_DIMENSIONS and asks_for_nothing([*value], depth + 1)):
            return True
    return False
