"""Laws of megatron_rl/rewards/line_rewards.py: dense rewards are bounded, sit on line ends and cannot be padded.

Laws of megatron_rl/rewards/line_rewards.py: good and bad lines of a program.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import ProcessRewardConfig, RewardConfig, RewardRouteConfig
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.code_lines import code_lines
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.rewards.line_rewards import (
    LineSearch,
    ProcessRewarder,
    line_labels,
    line_rewards,
    program_types,
    scored_lines,
    values_after_tokens,
)

PROGRAM = "Sure:\n```python\n# add\nx = 1\n\ny = 2\n```\n"


def decode(ids):
    return "".join(map(chr, ids))


def trajectory(text, score, *, finished=True, prompt="p:"):
    ids = tuple(map(ord, text))
    segment = Segment(ids, (0.0,) * len(ids), 0, "stop" if finished else "length", 0)
    prompt = Prompt("0", tuple(map(ord, prompt)))
    room = len(ids) if finished else len(ids) + 1
    return Trajectory(0, prompt, 0, 0, room, segments=[segment], score=score)


DEFAULTS = ProcessRewardConfig()


def rewards_of(text, score, values=None, config=DEFAULTS, **options):
    t = trajectory(text, score, **options)
    values = np.ones(len(text), dtype=np.float32) if values is None else values
    (rewards,) = ProcessRewarder(config, decode).dense_rewards([t], [values])
    return rewards


scores_and_kinds = st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), max_size=40)


@given(scores_and_kinds, st.floats(0, 10))
def test_sum_of_line_rewards_is_bounded_by_the_weight(lines, weight):
    rewards = line_rewards([s for s, _ in lines], [n for _, n in lines], weight)
    assert abs(rewards.astype(np.float64).sum()) <= weight * (1 + 1e-5)
    assert all(reward == 0 for reward, (_, neutral) in zip(rewards, lines) if neutral)


@given(scores_and_kinds, st.data())
def test_adding_comment_or_blank_lines_changes_no_other_reward(lines, data):
    padded = list(lines)
    for _ in range(data.draw(st.integers(1, 10))):
        padded.insert(data.draw(st.integers(0, len(padded))), (data.draw(st.floats(-2, 2)), True))
    before = line_rewards([s for s, _ in lines], [n for _, n in lines], 0.25)
    after = line_rewards([s for s, _ in padded], [n for _, n in padded], 0.25)
    counted = [reward for reward, (_, neutral) in zip(after, padded) if not neutral]
    assert counted == [reward for reward, (_, neutral) in zip(before, lines) if not neutral]


def test_the_weight_is_divided_by_the_lines_that_count():
    assert line_rewards([1, -1, 0.5, 9], [False, False, False, True], 0.3).tolist() == pytest.approx(
        [0.1, -0.1, 0.05, 0]
    )


def test_line_rewards_reject_invalid_scores():
    with pytest.raises(ValueError, match="not finite"):
        line_rewards([float("nan")], [False], 1.0)
    assert line_rewards([float("nan")], [True], 1.0).tolist() == [0.0]
    with pytest.raises(ValueError, match="one score per line"):
        line_rewards([1.0], [], 1.0)


def test_rewards_are_only_on_the_ends_of_scored_lines():
    rewards = rewards_of(PROGRAM, Score(0.0))
    ends = [PROGRAM.index(line) + len(line) for line in ("x = 1", "y = 2")]
    assert np.flatnonzero(rewards).tolist() == ends
    assert rewards.dtype == np.float32 and rewards[ends].tolist() == pytest.approx([0.125, 0.125])


def test_the_weight_follows_the_outcome():
    for value, total in ((0.0, 0.25), (0.99, 0.25), (1.0, 0.025)):
        assert rewards_of(PROGRAM, Score(value)).sum() == pytest.approx(total)


def test_weights_of_zero_restore_plain_rewards():
    config = ProcessRewardConfig(weight_if_failed=0.0, weight_if_passed=0.0)
    for value in (0.0, 1.0):
        assert not rewards_of(PROGRAM, Score(value), config=config).any()


def test_unscored_unfinished_and_programless_responses_get_nothing():
    assert not rewards_of(PROGRAM, Score(None, error="timeout")).any()
    assert not rewards_of(PROGRAM, None).any()
    assert not rewards_of(PROGRAM, Score(0.0), finished=False).any()
    assert not rewards_of("```python\n```", Score(0.0)).any()


def test_the_score_is_the_value_after_the_token_that_ends_the_line():
    values = np.linspace(-1, 1, len(PROGRAM)).astype(np.float32)
    rewards = rewards_of(PROGRAM, Score(0.0), values)
    for line in ("x = 1", "y = 2"):
        end = PROGRAM.index(line) + len(line)
        assert rewards[end] == pytest.approx(0.125 * values[end])


def test_values_may_cover_the_prompt_too():
    values = np.linspace(-1, 1, len(PROGRAM) + 2).astype(np.float32)
    assert rewards_of(PROGRAM, Score(0.0), values).tolist() == rewards_of(PROGRAM, Score(0.0), values[2:]).tolist()


def test_only_types_whose_responses_are_programs_are_rewarded():
    routes = {"math": RewardRouteConfig(name="math"), "code": RewardRouteConfig(name="code")}
    assert program_types(RewardConfig(by_type=routes)) == {"code"} and program_types(RewardConfig()) is None
    for type_, rewarded in (("code", True), ("math", False), ("", False)):
        t = trajectory(PROGRAM, Score(0.0))
        t.prompt = replace(t.prompt, type=type_)
        rewarder = ProcessRewarder(ProcessRewardConfig(), decode, program_types(RewardConfig(by_type=routes)))
        (rewards,) = rewarder.dense_rewards([t], [np.ones(len(PROGRAM))])
        assert rewards.any() == rewarded


def test_dense_rewards_reject_too_few_values():
    with pytest.raises(ValueError, match="values"):
        rewards_of(PROGRAM, Score(0.0), np.ones(3))
    with pytest.raises(ValueError, match="1 trajectories"):
        ProcessRewarder(ProcessRewardConfig(), decode).dense_rewards([trajectory("x", Score(1.0))], [])


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_values_after_tokens_undoes_the_alignment_before_tokens(lengths):
    total = sum(lengths)
    after = torch.arange(total, dtype=torch.float32) + 1
    cu_seqlens = cu_seqlens_of(torch.tensor(lengths))
    before = torch.cat([torch.zeros(1), after[:-1]])
    before[cu_seqlens[:-1]] = 0.0
    batch = PackedBatch(torch.zeros(total, dtype=torch.int64), cu_seqlens)
    pieces = values_after_tokens(batch, before, after[cu_seqlens[1:] - 1])
    assert [len(piece) for piece in pieces] == lengths
    assert np.concatenate(pieces).tolist() == after.tolist()


def test_lines_that_end_at_one_token_add_up_their_rewards():
    words = ["x\ny\n", "z"]
    t = trajectory("ab", Score(0.0))
    rewarder = ProcessRewarder(
        ProcessRewardConfig(weight_if_failed=0.3), lambda ids: "".join(words[i - 97] for i in ids)
    )
    (rewards,) = rewarder.dense_rewards([t], [np.ones(2)])
    assert rewards.tolist() == pytest.approx([0.2, 0.1])


def first_bad_line(num_lines, is_recoverable, passes):
    search = LineSearch(num_lines, passes=passes)
    while search.question is not None:
        search.answer(is_recoverable(search.question))
    return search.first_bad


@given(st.integers(0, 300), st.data())
def test_binary_search_equals_exhaustive_labeling_for_a_monotone_oracle(num_lines, data):
    first_bad = data.draw(st.integers(1, num_lines)) if num_lines else 1
    asked = []

    def is_recoverable(m):
        asked.append(m)
        return m < first_bad

    found = first_bad_line(num_lines, is_recoverable, passes=False)
    exhaustive = next((m for m in range(1, num_lines + 1) if not m < first_bad), num_lines + 1)
    assert found == exhaustive == first_bad
    assert len(asked) <= math.ceil(math.log2(max(num_lines, 1)))
    assert len(set(asked)) == len(asked) and all(1 <= m < num_lines for m in asked)


def test_passing_program_has_no_bad_line_and_needs_no_query():
    def never(m):
        raise AssertionError("asked")

    assert first_bad_line(9, never, passes=True) == 10
    assert first_bad_line(0, never, passes=False) == 1
    assert first_bad_line(1, never, passes=False) == 1


@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_labels_drop_once_even_if_the_oracle_contradicts_itself(num_lines, random):
    found = first_bad_line(num_lines, lambda m: random.random() < 0.5, passes=False)
    assert 1 <= found <= num_lines
    lines = code_lines("x = 1\n" * num_lines)
    labels = line_labels(lines, found)
    assert labels == sorted(labels, reverse=True) and set(labels) <= {1, -1} and labels[-1] == -1


def test_line_search_rejects_answers_and_results_out_of_order():
    search = LineSearch(2, passes=False)
    with pytest.raises(ValueError, match="not over"):
        assert search.first_bad
    search.answer(True)
    with pytest.raises(ValueError, match="over"):
        search.answer(True)
    assert search.first_bad == 2
    with pytest.raises(ValueError, match="num_lines"):
        LineSearch(-1, passes=False)


def test_neutral_lines_get_no_label_and_are_skipped_by_the_search():
    lines = code_lines("# add\ndef f():\n\n    # two\n    return 2\n")
    assert [line.text for line in scored_lines(lines)] == ["def f():", "    return 2"]
    assert line_labels(lines, first_bad=2) == [0, 1, 0, 0, -1]
    assert line_labels(lines, first_bad=3) == [0, 1, 0, 0, 1]
    assert line_labels(lines, first_bad=1) == [0, -1, 0, 0, -1]
