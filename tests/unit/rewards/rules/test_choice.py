"""The choice reward."""

import pytest

from megatron_rl.rewards.rules import choice


@pytest.mark.parametrize(
    "response",
    [
        "B",
        "(b)",
        "**B.** Paris",
        "The answer is (B).",
        "The answer is B because A is too small.",
        "So \\boxed{\\text{B}}",
        "A is wrong.\nB) Paris",
        "answer: option B",
    ],
)
def test_letter_counts_only_in_an_answer_position(response: str) -> None:
    assert choice.score(response, "(B)").value == 1.0
    assert choice.score(response, "A").value == 0.0


@pytest.mark.parametrize("response", ["A cat sat there", "I think so", "", "Because", "The answer is a cat", "Z"])
def test_words_are_not_picks(response: str) -> None:
    assert [choice.score(response, letter).value for letter in "ABI"] == [0.0] * 3


def test_ground_truth_that_is_not_a_letter_is_unscored() -> None:
    assert choice.score("B", "Paris").value is None
    assert choice.score("B", "E", letters="ABCD").value is None
