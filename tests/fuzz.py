"""Broken inputs: their generation, and the law that each must satisfy.

The law: an input is taken, or refused by a ``UserError`` of a few words; there is no other error and no hang. In the usual
profile the inputs are the same in every run and few enough for a minute; ``--hypothesis-profile=fuzz`` draws fifty times as
many and others in each run (``--hypothesis-seed=N`` repeats one).
"""

import contextlib
import copy
import math
import signal
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_rl.errors import UserError

FUZZ_PROFILE = "fuzz"
_THOROUGH = 50
_LONGEST_S = 60
"""Limit for one input, on a busy machine."""
_MAX_MESSAGE = 4000


def mutations(number: int) -> settings:
    """Decorates a test of ``number`` broken inputs; of many more with the profile."""
    is_thorough = settings.get_current_profile_name() == FUZZ_PROFILE
    return settings(
        max_examples=number * (_THOROUGH if is_thorough else 1),
        derandomize=not is_thorough,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def taken_or_refused(*names: str) -> Iterator[None]:
    """The law. A refusal names one of ``names``: the file, the key or the field."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"no end after {_LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(_LONGEST_S)
    try:
        yield
    except UserError as error:
        message = str(error)
        assert message.strip() and len(message) < _MAX_MESSAGE, message
        assert not names or any(name in message for name in names), message
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


_NUMBERS = [0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-300, 1e300, math.nan, math.inf, -math.inf]
_TEXTS = ["", " ", "x", "0", "true", "null", "\0", "\ud800", "../..", "a\nb", "é" * 50, "${x}", "1e400"]
ODD_VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        False,
        *_NUMBERS,
        *_TEXTS,
        [],
        {},
        [[]],
        [{}],
        {"a": 1},
        [None],
        [1, "a"],
        {"a": {"b": [1]}},
        [math.nan],
    ]
)
"""Values of every JSON type, and the extremes of each."""
USUAL_VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 100, 1000, 4096, 10**6, 1e-12, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0001, 1.5, 1e4, True, False]
)
"""Values that most bounds allow, so that combinations of keys are reached."""


def deep(depth: int) -> Any:
    """Lists within lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@st.composite
def mutated(draw: st.DrawFn, document: Any, *, at_most: int = 2) -> Any:
    """A copy of a JSON document with one or more of its values replaced, removed, renamed or nested."""
    changed = {"": copy.deepcopy(document)}
    for _ in range(draw(st.integers(1, at_most))):
        parent, name = draw(st.sampled_from(list(_places(changed))))
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "wrap", "deepen"]))
        if name == "" and kind in ("remove", "rename"):
            kind = "replace"
        if kind == "replace":
            parent[name] = copy.deepcopy(draw(ODD_VALUES))
        elif kind == "wrap":
            parent[name] = draw(st.sampled_from([[parent[name]], {"a": parent[name]}, [parent[name]] * 2]))
        elif kind == "deepen":
            parent[name] = deep(draw(st.sampled_from([3, 60])))
        elif kind == "remove" or isinstance(parent, list):
            del parent[name]
        else:
            parent[f"{name}x"] = parent.pop(name)
    return changed[""]


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
    for name, value in items:
        yield node, name
        if isinstance(value, dict | list):
            yield from _places(value)


@st.composite
def mutated_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` cut, with flipped bits, inserted bytes, or duplicated parts."""
    place = draw(st.integers(0, max(0, len(content) - 1)))
    length = draw(st.integers(1, 16))
    kind = draw(st.sampled_from(["cut", "turn", "insert", "double", "zero", "prefix"]))
    if kind == "cut":
        return content[:place]
    if kind == "turn":
        return (
            content[:place]
            + bytes(byte ^ (1 << length % 8) for byte in content[place : place + 1])
            + content[place + 1 :]
        )
    if kind == "insert":
        odd = [b"\xff\xfe", b"\0", b"\xed\xa0\x80", b'"', b"[" * 5000, b"{", b"NaN", b"\\ud800", b"\n", b"1" * 5000]
        return content[:place] + draw(st.sampled_from(odd)) + content[place:]
    if kind == "double":
        return content[: place + length] + content[place:]
    if kind == "zero":
        return content[:place] + bytes(length) + content[place + length :]
    return draw(st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\x1f\x8b"])) + content
