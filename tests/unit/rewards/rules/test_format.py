"""The format reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.rules import format as format_reward


def value_of(outcome: "float | Score") -> float | None:
    return outcome.value if isinstance(outcome, Score) else outcome


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
