"""Rewards by prompt type: one reward per prompt, one range per run, format before content."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import RewardConfig, RewardRouteConfig
from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rewards.router import (
    ScoreItem,
    build_rewards,
    check_prompts,
    check_types,
    routes_of,
    wanted_row_fields,
)
from megatron_rl.rewards.rules.format import split_thought
from tests.unit.rewards import async_rewards

PATH = "tests.unit.rewards.async_rewards"


@pytest.fixture(autouse=True)
def fresh() -> None:
    async_rewards.calls.clear()


def config(**by_type) -> RewardConfig:
    routes = {type_: RewardRouteConfig(**route) for type_, route in by_type.items()}
    return RewardConfig(name="", by_type=routes, timeout_s=2.0)


MIXED = {
    "math": dict(name="test_unit"),
    "chat": dict(name="test_free"),
    "games": dict(name="test_signed", rescale_to=[0, 1]),
}


def score(reward: RewardConfig, *items: ScoreItem) -> list[Score]:
    with build_rewards(reward) as rewards:
        return asyncio.run(rewards.score_many(items))


def test_every_item_is_scored_by_the_reward_of_its_type():
    items = [
        ScoreItem("4", "4", "2+2", "math", {"tests": "t1"}),
        ScoreItem("hi", "", "hello", "chat"),
        ScoreItem("-1", "", "", "games"),
        ScoreItem("5", "4", "2+2", "math", {"tests": "t2"}),
        ScoreItem("0.5", "", "", "games"),
    ]
    scores = score(config(**MIXED), *items)
    assert [s.value for s in scores] == [1.0, 1.0, 0.0, 0.0, 0.75]
    assert [s.detail.partition(":")[0] for s in scores] == [
        "test_unit", "test_free", "test_signed", "test_unit", "test_signed",
    ]  # fmt: skip
    assert scores[0].metrics == {"mean_of_math": 1.0} and scores[4].metrics == {"mean_of_games": 0.75}
    assert max(async_rewards.calls.values()) == 1


def test_one_reward_for_all_types_needs_no_routes():
    items = [ScoreItem("a", "a", type="x"), ScoreItem("a", "b", type="y")]
    scores = score(RewardConfig(name=f"{PATH}:exact"), *items)
    assert scores == [Score(1.0), Score(0.0)]
    check_types(RewardConfig(name="math"), ["anything"])


def test_worker_processes_and_event_loops_grade_the_same_batch():
    by_type = config(math=dict(name="math"), chat=dict(name="test_free"))
    items = [ScoreItem("4", "4", type="math"), ScoreItem("x", "", "p", "chat"), ScoreItem("5", "4", type="math")]
    assert [s.value for s in score(by_type, *items)] == [1.0, 1.0, 0.0]


def test_rewards_get_the_prompt_and_the_row_fields_they_name():
    item = ScoreItem("r", "a", "the prompt", "chat", {"clue": "look", "other": 3})
    (found,) = score(config(chat=dict(name="test_free")), item)
    assert found.detail == "test_free: the prompt|look|answer,clue,other,prompt,type"
    (found,) = score(config(chat=dict(name="test_free", options={"hint": "set"})), item)
    assert "|set|" in found.detail


# --------------------------------------------------------------------------------------------------------------- ranges


def test_different_ranges_are_rejected_unless_rescaled():
    different = {"math": dict(name="test_unit"), "games": dict(name="test_signed")}
    with pytest.raises(RewardError, match=r"(?s)math: test_unit \[0, 1\].*games: test_signed \[-1, 1\].*rescale_to"):
        routes_of(config(**different))
    routes_of(config(**{**different, "games": dict(name="test_signed", rescale_to=[0, 1])}))
    with pytest.raises(RewardError, match="different ranges"):
        routes_of(config(**{**different, "games": dict(name="test_signed", rescale_to=[0, 2])}))


def test_undeclared_range_is_rejected_only_with_several_rewards():
    exact = dict(name=f"{PATH}:exact")
    routes_of(config(a=exact, b=exact))
    with pytest.raises(RewardError, match="not declared"):
        routes_of(config(a=exact, b=dict(name="math")))
    with pytest.raises(RewardError, match="needs to know the range"):
        routes_of(config(a=dict(**exact, rescale_to=[0, 1])))


@pytest.mark.parametrize("bounds", [[0], [1, 0], [0, 0], [0, 1, 2]])
def test_invalid_rescale_to_is_rejected(bounds: list[float]):
    with pytest.raises(RewardError, match="rescale_to must be"):
        routes_of(config(a=dict(name="test_signed", rescale_to=bounds)))


@given(st.floats(-1, 1), st.floats(-5, 5), st.floats(0.5, 5))
def test_rescaling_is_linear_and_stays_inside(value: float, low: float, width: float):
    route = routes_of(config(a=dict(name="test_signed", rescale_to=[low, low + width])))["a"]
    found = route.finish(Score(value)).value
    assert found == pytest.approx(low + width * (value + 1) / 2, abs=1e-9)
    assert low - 1e-12 <= found <= low + width + 1e-12


def test_value_outside_the_declared_range_is_unscored():
    (found,) = score(RewardConfig(name="test_signed"), ScoreItem("7", ""))
    assert found.value is None and "outside its declared range [-1, 1]" in found.error


# ------------------------------------------------------------------------------------------------------------- thought


def test_missing_thought_scores_0_without_a_call():
    thinking = RewardConfig(name=f"{PATH}:exact", require_think=True)
    responses = ["<think>hm</think>4", "4", "<think>4", "hm</think>4", "<think></think>4", "<think>a</think>  "]
    scores = score(thinking, *[ScoreItem(response, "4") for response in responses])
    assert [s.value for s in scores] == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert [s.metrics["thought"] for s in scores] == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert async_rewards.calls == {"4": 2}


@given(st.text(alphabet="ab<>/think \n", max_size=30), st.text(alphabet="ab<>/think \n", max_size=30))
def test_split_thought_accepts_exactly_the_required_form(thought: str, solution: str):
    whole = f"<think>{thought}</think>{solution}"
    clean = all(tag not in thought + "|" + solution for tag in ("<think>", "</think>")) and solution.strip()
    found = split_thought(whole)
    if clean and whole.count("</think>") == 1 and whole.count("<think>") == 1:
        assert found == (thought.strip(), solution.strip())
    else:
        assert found is None


def test_require_think_is_rejected_if_0_is_not_the_lowest_value():
    with pytest.raises(RewardError, match="must be the lowest value"):
        routes_of(RewardConfig(name="test_signed", require_think=True))


# ------------------------------------------------------------------------------------------------------- before a start


def test_prompt_types_without_a_reward_are_rejected():
    with pytest.raises(RewardError, match="'poems'.*it has chat, games, math"):
        check_types(config(**MIXED), ["math", "poems"])
    with build_rewards(config(chat=dict(name="test_free"))) as rewards, pytest.raises(RewardError, match="poems"):
        rewards.submit([ScoreItem("", "", type="poems")])


def test_prompts_that_lack_a_field_are_reported_by_row():
    prompts = [
        Prompt("1", (1,), answer="4", source="a.jsonl:1", type="math", fields={"tests": "x"}),
        Prompt("2", (1,), answer="4", source="a.jsonl:2", type="math"),
        Prompt("3", (1,), answer="-", source="a.jsonl:3", type="chat"),
    ]
    with pytest.raises(RewardError, match=r"(?s)1 problems.*a\.jsonl:2: field 'tests' is missing"):
        check_prompts(config(**MIXED), prompts)
    check_prompts(config(**MIXED), [prompts[0], prompts[2]])
    assert wanted_row_fields(config(**MIXED)) == ["tests", "hint", "clue"]


def test_a_verifier_needs_an_answer_and_a_judge_does_not():
    prompts = [Prompt("1", (1,), source="a.jsonl:1", type="math"), Prompt("2", (1,), source="a.jsonl:2", type="chat")]
    mixed = config(math=dict(name="math"), chat=dict(name="http", options={"url": "http://x"}))
    with pytest.raises(RewardError, match=r"(?s)1 problems.*a\.jsonl:1: it has no answer"):
        check_prompts(mixed, prompts)
    check_prompts(mixed, prompts[1:])


def test_unserializable_fields_leave_only_their_item_unscored():
    reward = config(tests=dict(name="tests.integration.hostile_rewards:with_fields"))
    items = [ScoreItem("abc", "", type="tests", fields={"bonus": bonus}) for bonus in (1, object(), 2, {3}, 4)]
    scores = score(reward, *items)
    assert [s.value for s in scores] == [4.0, None, 5.0, None, 7.0]
    assert "not plain JSON values" in scores[1].error


def test_an_item_that_lacks_a_field_is_unscored():
    (found,) = score(config(math=dict(name="test_unit")), ScoreItem("4", "4", type="math"))
    assert found.value is None and "tests" in found.error


@pytest.mark.parametrize(
    "reward", [RewardConfig(name=""), config(a=dict(name="")), config(a=dict(name="math", options={"no": 1}))]
)
def test_invalid_reward_configurations_are_rejected(reward: RewardConfig):
    with pytest.raises(RewardError):
        routes_of(reward)


def test_no_reward_keeps_running_when_one_does_not_start():
    before = threading.active_count()
    broken = config(a=dict(name="test_free"), b=dict(name="test_unit", timeout_s=-1.0))
    with pytest.raises(RewardError, match="timeout_s"):
        build_rewards(broken)
    assert (
        sum(t.name.startswith("reward-test_free") and not t.name.endswith("watch") for t in threading.enumerate()) == 0
    )
    assert threading.active_count() <= before + 1


def test_one_runner_serves_types_with_the_same_reward():
    same = dict(name="math")
    with build_rewards(config(a=same, b=same, c=dict(name="math", options={"extract": "exact"}))) as rewards:
        assert len(rewards._runners) == 2


def test_closed_router_rejects_calls():
    rewards = build_rewards(config(a=dict(name="test_free")))
    rewards.close()
    with pytest.raises(RewardError, match="is closed"):
        rewards.submit([ScoreItem("x", "", "p", "a")])


def test_call_in_progress_ends_with_the_router():
    slow = build_rewards(RewardConfig(name=f"{PATH}:misbehave", timeout_s=60.0))
    waiting = slow.submit([ScoreItem("sleep 50", "")])
    slow.close()
    with pytest.raises(RewardError, match="is closed"):
        waiting.result(timeout=1)


def test_reward_wall_limit_must_be_below_the_runner_timeout():
    with pytest.raises(RewardError, match=r"wall_limit_s=4.5.*3 s of timeout_s"):
        routes_of(RewardConfig(name="code", timeout_s=3.0))
    assert routes_of(RewardConfig(name="code"))
