"""Laws of megatron_rl/rewards/lines/labels.py: good and bad lines of a program."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.code_lines import code_lines
from megatron_rl.rewards.lines.labels import LineSearch, line_labels, scored_lines


def first_bad_line(num_lines, is_recoverable, passes):
    search = LineSearch(num_lines, passes=passes)
    while search.question is not None:
        search.answer(is_recoverable(search.question))
    return search.first_bad


@given(st.integers(0, 300), st.data())
def test_binary_search_equals_exhaustive_labelling_for_a_monotone_oracle(num_lines, data):
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
