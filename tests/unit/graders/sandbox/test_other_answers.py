"""Other answers: each plain value becomes another one that the tests can go on with."""

from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.graders.sandbox.other_answers import other_reply
from megatron_rl.graders.sandbox.values import decode, encode

FIRST_DAY = datetime(2020, 1, 1)
SAME_TYPE: list[Any] = [
    True, 0, -3, 10**30, 1.5, 2j, "", "aB", b"", b"x", Decimal("0.1"), Fraction(1, 3), date(2020, 1, 1), FIRST_DAY, timedelta(1),
    Path("a"), (1, "a"), frozenset({1}), [], [0], {}, {"a": 1}, set(), {2}, deque([1], 3), bytearray(b"a"), Counter("aab"),
    OrderedDict(a=1), defaultdict(int, a=1), np.arange(3), np.float32(1), np.array(2), {"a": 1}.keys(), [(1, [2])], array("i", [1]),
]  # fmt: skip
OTHER_TYPE: list[Any] = [None, time(1), range(3), slice(1), int]


def other(value: Any) -> Any:
    message, _ = encode([value], lambda each: pytest.fail(f"no plain value: {each}"), {})
    return decode(other_reply(message, [], 7), lambda each: None, {})[0][0]


@pytest.mark.parametrize("value", [*SAME_TYPE, *OTHER_TYPE], ids=repr)
def test_every_value_becomes_another_one(value: Any) -> None:
    assert repr(other(value)) != repr(value)
    assert type(other(value)) is type(value) or value in OTHER_TYPE


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, {2}, np.arange(6).reshape(3, 2), deque([1])], ids=repr)
def test_containers_get_an_item_more(value: Any) -> None:
    assert len(other(value)) == len(value) + 1


def test_what_the_tests_have_keeps_its_type_and_shape() -> None:
    known = [np.arange(3), [1, 2]]
    sent, _ = encode(known, lambda each: [], {})
    reply = {"values": [[0]], "nodes": [None, ["list", [5]]]}
    values, containers = decode(other_reply(reply, sent["nodes"], 7), lambda each: None, {}, known)
    assert values[0] is known[0] and known[0].tolist() == [7, 8, 9] and containers[1] == [12, 19]


def test_names_of_keywords_and_attributes_stay() -> None:
    reply = {"callback": 0, "values": [["tuple", [1]], [0]], "nodes": [["dict", [["key", 1]], ""]]}
    assert decode(other_reply(reply, [], 7), lambda each: None, {})[0] == [(8,), {"key": 8}]
