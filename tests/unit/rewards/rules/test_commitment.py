"""An answer counts if the response commits to it: not hedged, not denied, not in its thought, not one of many boxes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards.rules import choice
from megatron_rl.rewards.rules.math import score

numbers = st.lists(st.integers(2, 400), min_size=3, max_size=4, unique=True)

HEDGES = [
    "The answer is {0} or {1}.",
    "The answer is {0} or {1} or {2}.",
    "The answer is {0}, {1} or {2}.",
    "The answer is either {0} or {1}.",
    "The answer is one of {0}, {1}, {2}.",
    "The answer is {0} (or {1}, or {2}).",
    "The answer is between {0} and {1}.",
    "The answer is at least {0}.",
    "The answer is at most {0}.",
    "The answer is about {0}.",
    "The answer is more than {0}.",
    "The answer is not {0}.",
    "The answer isn't {0}.",
    "The answer is not ${0}$.",
    "The answer is maybe {0}.",
    "The answer is {0}. Or {1}. Or {2}.",
    "The answer is {0}. Wait, it is {1}.",
    "I don't think the answer is {0}.",
    "If the answer is {0}, I am wrong.",
    "The wrong answer is {0}.",
    "It could be {0}.",
    "Maybe {0}",
    "Either {1} or {0}",
    "{1} or {0}",
    "It is not {0}.",
    "I refuse to say {0}.",
    "The value is between {1} and {0}.",
    "x < {0}",
    "x \\ne {0}",
    "It might be $x = {0}$.",
    "\\boxed{{{0} \\text{{ or }} {1}}}",
    "\\boxed{{{0}}} or \\boxed{{{1}}}",
    "\\boxed{{{1}}}, \\boxed{{{0}}}",
    "\\boxed{{{0}}} \\boxed{{{1}}} \\boxed{{{2}}}",
    "\\boxed{{\\text{{not }} {0}}}",
    "\\boxed{{> {0}}}",
    "\\boxed{{{0}, {1}}}",
    "\\boxed{{{0}}} is my first guess. \\boxed{{{1}}} is my second.",
]


@settings(max_examples=5, deadline=None)
@given(numbers)
@pytest.mark.parametrize("hedge", HEDGES)
def test_hedges_denials_and_lists_earn_nothing(hedge: str, numbers: list[int]) -> None:
    assert score(hedge.format(*numbers), str(numbers[0])).value == 0.0


COMMITMENTS = [
    "The answer is {0} because {1} - {2} is too large.",
    "The answer is {0}, since {1} or {2} would not do.",
    "The answer is {0}.",
    "The answer is {0}!",
    "The answer is **{0}**.",
    "The answer is {0} apples.",
    "The answer is ${0}$ as {1} is not prime.",
    "Final answer: {0}",
    "It is not {1}, so the answer is {0}.",
    "The number of points that could be inside is {0}.",
    "It cannot be {1}. So it is {0}.",
    "So x = {0}",
    "Therefore $x = {0}$.",
    "He makes ${0}.",
    "\\boxed{{{1}}}? No: \\boxed{{{0}}}",
    "\\boxed{{{0}}}, so \\boxed{{{0}}}",
    "\\boxed{{{1}}} was wrong. The final answer is {0}.",
    "\\boxed{{{0}}} The answer is easy to check.",
    "<think>It could be \\boxed{{{1}}}.</think>The answer is {0}.",
    "maybe {1} or {2}</think>\\boxed{{{0}}}",
]


@settings(max_examples=5, deadline=None)
@given(numbers)
@pytest.mark.parametrize("commitment", COMMITMENTS)
def test_a_plain_commitment_counts(commitment: str, numbers: list[int]) -> None:
    response = commitment.format(*numbers)
    assert score(response, str(numbers[0])).value == 1.0
    assert score(response, str(numbers[1])).value == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "<think>\\boxed{7}</think> I refuse.",
        "<think>\\boxed{7}</think>The answer is 9.",
        "<think>\\boxed{7}",
        "</think>7<think>",
        "<think>7</think>",
    ],
)
@pytest.mark.parametrize("extract", ["auto", "boxed"])
def test_text_in_the_thought_is_not_an_answer(response: str, extract) -> None:
    assert score(response, "7", extract=extract).value == 0.0


def test_adjacent_boxes_are_one_answer() -> None:
    for response in (
        "\\boxed{4} and \\boxed{6}",
        "$\\boxed{6}$, $\\boxed{4}$",
        "\\(\\boxed{4}\\) \\quad \\text{and} \\quad \\(\\boxed{6}\\)",
    ):
        for truth in ("\\{4, 6\\}", "4, 6", "x = 4 or x = 6", "\\boxed{4} cats and \\boxed{6} dogs"):
            assert score(response, truth).value == 1.0
        assert score(response, "4").value == score(response, "6").value == 0.0
    assert score("\\boxed{6}", "\\boxed{4} cats and \\boxed{6} dogs").value == 0.0


@pytest.mark.parametrize(
    ("response", "picked"),
    [
        ("the answer is b because", "B"),
        ("The answer is (B), not (A).", "B"),
        ("<think>\\boxed{A}</think>B", "B"),
        ("(A) (B) (C)", ""),
        ("A, B", ""),
        ("The answer is A or B.", ""),
        ("The answer is B or C because both hold.", ""),
        ("The answer is not B.", ""),
        ("\\boxed{A} and \\boxed{B}", ""),
        ("<think>\\boxed{B}", ""),
        ("The answer is a cat", ""),
    ],
)
def test_one_letter_is_a_pick_and_several_are_not(response: str, picked: str) -> None:
    assert [letter for letter in "ABC" if choice.score(response, letter).value == 1.0] == list(picked)
