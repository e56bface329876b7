"""Converts test cases given as data, rows of APPS (``input_output``) and LiveCodeBench, to tests for the sandbox. Pure.

A case is the text that the program reads and the text that it must print, or arguments of a function and its result.
The comparison functions are at the end of this file; they run with the tests, never in the program's interpreter.
"""

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

IMPORTS = (
    "from typing import *; from collections import *; from heapq import *; from bisect import *; from itertools import *\n"
    "from functools import *; from math import *; from builtins import pow\n"
    "import typing, collections, heapq, bisect, itertools, functools, math, sys, os, re, string, random, operator, copy, io\n"
    "import json, datetime, time, statistics, fractions, decimal\n"
)
"""Imports that these data sets let a program use without importing."""


Case = tuple[Any, list[Any]]
"""Input text or list of arguments, and the accepted outputs or results."""


def read_cases(tests: Any, function: str = "") -> tuple[list[Case], str] | None:
    """(cases, name of the function or ""), or None if ``tests`` are not cases but source text or a list of it.

    Args:
        tests: {"inputs", "outputs", "fn_name"?}, [{"input", "output", "testtype"?}, ...], or JSON text of either.
        function: Function to call if the cases do not name one.

    Raises:
        ValueError: cases that cannot run, with the reason.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            return None
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
            raise ValueError("expected lists 'inputs' and 'outputs' of one length, which is not 0")
        name = tests.get("fn_name") or ""
        if not isinstance(name, str):
            raise ValueError(f"expected the name of a function as fn_name, got {name!r:.40}")
        make = _call if name else _printed
        return [make(given, expected) for given, expected in zip(inputs, outputs, strict=True)], name
    if not isinstance(tests, Sequence) or not tests or not all(isinstance(test, Mapping) for test in tests):
        return None
    if not all("input" in test and "output" in test for test in tests):
        raise ValueError("expected cases with 'input' and 'output'")
    called = [test.get("testtype") == "functional" for test in tests]
    if any(called) and not (all(called) and function):
        raise ValueError("functional cases need the row's entry_point (fn_name), and no stdin cases next to them")
    make = _call if any(called) else _printed
    return [make(test["input"], test["output"]) for test in tests], function if any(called) else ""


def _printed(given: Any, expected: Any) -> Case:
    texts = ["\n".join(map(str, part)) if isinstance(part, list) else part for part in (given, expected)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected texts as input and output, got {given!r:.40} and {expected!r:.40}")
    return texts[0], [texts[1]]


def _call(given: Any, expected: Any) -> Case:
    """Case that calls a function. Arguments are a list, or one JSON value per line; the result is a value, JSON text,
    or a list around it."""
    is_list = isinstance(given, list)
    if isinstance(given, str):
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list):
        raise ValueError(f"expected a list of arguments, got {given!r:.40}")
    if not isinstance(expected, str):
        return given, [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else [])]
    try:
        return given, [json.loads(expected), *([expected] if is_list else [])]  # a list holds values: its result may be a text
    except ValueError:
        return given, [expected]


def tests_of(cases: Sequence[Case], function: str) -> str:
    """Tests in Python source. The cases are one JSON text, which is parsed faster than Python literals."""
    data = json.dumps(cases)
    check = (
        f"any(same_result(_result, right) for _result in [{function}(*given)] for right in expected)"
        if function
        else "same_output(run_program(given), expected[0])"
    )
    lines = [f"given, expected = CASES[{number}]\nassert {check}" for number in range(len(cases))]
    # Tests are self-contained source text, so the comparison functions are copied into them.
    source = "\n".join(inspect.getsource(part) for part in (_close, same_output, same_result))
    source += f"\n_kind_of = type\n_FRACTION, _DECIMAL = {_FRACTION!r}, {_DECIMAL!r}"
    return "\n".join(["import json, math, re", source, f"CASES = json.loads({data!r})", *lines])


# --------------------------------------------------------------------------------------------------------- comparisons


def _close(got: float, expected: float) -> bool:
    return got == expected or math.isclose(got, expected, rel_tol=1e-6, abs_tol=0 if expected else 1e-9)


_kind_of = type
"""``type``, which tests may not call on objects of the program."""
_FRACTION = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=e[-+]))(?:e[-+]?[0-9]+)?"
_DECIMAL = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?"


def same_output(got: str, expected: str) -> bool:
    """Compare outputs line by line, ignoring surrounding whitespace; fractions may differ by 1e-6, relative."""
    lines = [[line.split() for line in text.strip().split("\n")] for text in (got, expected)]
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    words = [[word for line in text for word in line] for text in lines]
    # Words and integers must match as text; only fractions have a tolerance.
    return all(
        one == other
        or (bool(re.fullmatch(_FRACTION, other, re.I) and re.fullmatch(_DECIMAL, one, re.I)) and _close(float(one), float(other)))
        for one, other in zip(*words, strict=True)
    )


def same_result(got: object, expected: object) -> bool:
    """Compare results as JSON does: tuples, arrays and iterators equal lists, keys of dicts are text; fractions may differ as
    in ``same_output``."""
    if _kind_of(got).__name__ == "Handle":
        return False  # an object of the program
    if hasattr(_kind_of(got), "tolist"):
        got = got.tolist()  # type: ignore[attr-defined]
    if hasattr(_kind_of(got), "__next__") and isinstance(expected, list):
        items: list[object] = []
        for item in got:  # type: ignore[attr-defined]
            items.append(item)
            if len(items) > len(expected):
                break
        got = items
    if isinstance(got, (list, tuple)) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same_result, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        named = {str(key): value for key, value in got.items()}
        is_whole = len(named) == len(got) and named.keys() == expected.keys()
        return is_whole and all(same_result(named[key], expected[key]) for key in named)
    if isinstance(got, (int, float)) and isinstance(expected, float):
        return _close(got, expected)
    return got == expected
