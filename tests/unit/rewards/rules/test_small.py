"""The format, choice, grounding and regex rewards, and their registry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards import registry
from megatron_rl.rewards.rules import choice, grounding
from megatron_rl.rewards.rules import format as format_reward
from megatron_rl.rewards.rules import regex as instruction


def value_of(outcome: "float | Score") -> float | None:
    return outcome.value if isinstance(outcome, Score) else outcome


# ------------------------------------------------------------------------------------------------------------- format

plain_text = st.text(st.characters(exclude_characters="<>"), max_size=30)


@given(plain_text, plain_text)
def test_format_reward_needs_exactly_one_thought_and_a_solution(thought: str, solution: str) -> None:
    response = f"<think>{thought}</think>{solution}"
    expected = (thought.strip(), solution.strip()) if solution.strip() else None
    assert format_reward.split_thought(response) == expected
    assert format_reward.split_thought(response.removeprefix("<think>"), opened_by_prompt=True) == expected
    assert value_of(format_reward.score(response, "")) == float(expected is not None)


@pytest.mark.parametrize(
    "response",
    [
        "42",
        "<think>42",
        "thought</think>42",
        "<think>a</think>",
        "<think>a</think> \n",
        "Sure! <think>a</think>42",
        "<think>a</think>4<think>b</think>2",
        "<think><think>a</think>42",
        "<think>a</think></think>42",
        "</think>a<think>42",
        "<THINK>a</THINK>42",
    ],
)
def test_malformed_response_scores_0_before_the_inner_reward(response: str) -> None:
    assert value_of(format_reward.score(response, "42", then="math")) == 0.0


def test_format_reward_passes_only_the_solution() -> None:
    assert value_of(format_reward.score("<think>41</think>42", "42", then="math")) == 1.0
    assert value_of(format_reward.score("<think>\\boxed{42}</think>41", "42", then="math")) == 0.0
    boxed = {"then": "math", "then_options": {"extract": "boxed"}}
    assert value_of(format_reward.score("<think></think>42", "42", **boxed)) == 0.0
    assert value_of(format_reward.score("<think></think>\\boxed{42}", "42", **boxed)) == 1.0


# ------------------------------------------------------------------------------------------------------------- choice


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


# ---------------------------------------------------------------------------------------------------------- grounding

boxes = st.tuples(*[st.integers(0, 998)] * 4).map(
    lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]) + 1, max(c[1], c[3]) + 1)
)


@given(boxes, boxes)
def test_overlap_counts_shared_cells_over_covered_cells(first, second) -> None:
    def overlap(low: int, high: int) -> int:
        return len(range(max(first[low], second[low]), min(first[high], second[high])))

    shared = overlap(0, 2) * overlap(1, 3)
    covered = sum((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (first, second)) - shared
    response = f"at <bbox>{first[0]} {first[1]}, {first[2]} {first[3]}</bbox>."
    answer = " ".join(map(str, second))
    assert grounding.score_box(response, answer).value == pytest.approx(shared / covered)
    assert grounding.score_box(response, answer, min_iou=0.5).value == float(2 * shared >= covered)


@given(boxes)
def test_a_point_hits_inside_and_on_the_border_only(box) -> None:
    x1, y1, x2, y2 = box
    answer = f"<bbox>{x1} {y1} {x2} {y2}</bbox>"
    assert grounding.score_point(f"<point>{x1} {y2}</point>", answer).value == 1.0
    assert grounding.score_point(f"<point>{(x1 + x2) / 2},{(y1 + y2) / 2}</point>", answer).value == 1.0
    assert grounding.score_point(f"<point>{x1 - 1} {y1}</point>", answer).value == 0.0
    assert grounding.score_point(f"<point>{x1} {y2 + 0.5}</point>", answer).value == 0.0


@pytest.mark.parametrize(
    "content", ["", "1 2 3", "1 2 3 4 5", "3 3 1 1", "1 1 1 2", "a b c d", "nan 0 1 1", "0 0 inf 2"]
)
def test_a_malformed_box_is_zero_in_a_response_and_unscored_in_the_truth(content: str) -> None:
    assert grounding.score_box(f"<bbox>{content}</bbox>", "0 0 9 9").value == 0.0
    assert grounding.score_box("<bbox>0 0 9 9</bbox>", content).value is None
    assert grounding.score_point("<point>1 1</point>", content).value is None


def test_the_last_tag_counts() -> None:
    assert grounding.score_box("<bbox>5 5 6 6</bbox> no: <bbox>0 0 2 2</bbox>", "0 0 2 2").value == 1.0
    assert grounding.score_box("<bbox>0 0 2 2", "0 0 2 2").value == 0.0


# -------------------------------------------------------------------------------------------------------------- regex


def test_regex_reward_uses_the_ground_truth_as_pattern() -> None:
    assert instruction.score("say Hello twice", "hel+o").value == 0.0
    assert instruction.score("say Hello twice", "hel+o", ignore_case=True).value == 1.0
    assert instruction.score("hello there", "hel+o", match="fullmatch").value == 0.0
    assert instruction.score("hello", "hel+o", match="fullmatch").value == 1.0
    assert instruction.score("hello", "(").value is None


# ----------------------------------------------------------------------------------------------------------- registry


def test_a_registered_reward_is_found_by_name_and_by_path() -> None:
    by_name = registry.resolve("format")
    assert registry.resolve(by_name.path) is by_name
    assert by_name.path == "megatron_rl.rewards.rules.format:score"


def test_reward_name_can_be_registered_only_once() -> None:
    with pytest.raises(registry.RewardError, match="is megatron_rl.rewards.rules.math:score already"):
        registry.register("math")(format_reward.score)
    assert registry.resolve("math").function.__module__ == "megatron_rl.rewards.rules.math"


def test_reward_that_workers_cannot_import_is_rejected() -> None:
    def local(response: str, answer: str) -> float:
        return 0.0

    registry._check_function(registry.resolve("math"))
    with pytest.raises(registry.RewardError, match="cannot import"):
        registry._check_function(registry.Reward("local", local))
