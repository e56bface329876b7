"""The benchmarks run, and what they time is right."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatron_rl.rewards.rules import math as math_reward

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(autouse=True)
def tools_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_are_checked_and_timed(dtype: torch.dtype):
    from bench_algorithms import measure_advantages

    table = measure_advantages(Console(quiet=True), count=30, width=70, repeats=1, dtype=dtype)
    assert table.row_count >= 8


def test_a_wrong_computation_is_not_timed():
    from bench_algorithms import check_equal_results, computations, make_batch

    batch = make_batch(5, 20, torch.float32)
    found = computations(batch)
    found["gae, equal lengths"] = lambda: batch.rewards.view(-1) * 0
    with pytest.raises(AssertionError, match="not close"):
        check_equal_results(batch, found)


def test_answers_to_grade_get_the_scores_that_they_deserve():
    from bench_grading import Graded, expressions, short_answers

    for graded in (short_answers(40), expressions(4)):
        graded.check([math_reward.score(*item) for item in graded.items])
        wrong = Graded(graded.items, [1.0 - expected for expected in graded.expected])
        with pytest.raises(RuntimeError, match="expected the score"):
            wrong.check([math_reward.score(*item) for item in graded.items])
