"""What the batching benchmark compares with is right: tools/bench_batching.py."""

import itertools
import random
from pathlib import Path

import pytest
from rich.console import Console

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(autouse=True)
def tools_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


def test_karmarkar_karp_partitions_and_is_near_the_optimum():
    from bench_batching import karmarkar_karp

    draw = random.Random(3)
    for _ in range(30):
        weights, num_parts = [float(draw.randint(1, 40)) for _ in range(draw.randint(1, 6))], draw.randint(1, 3)
        parts = karmarkar_karp(weights, num_parts)
        assert len(parts) == num_parts
        assert sorted(i for part in parts for i in part) == list(range(len(weights)))
        best = min(
            max(sum(w for w, place in zip(weights, places) if place == part) for part in range(num_parts))
            for places in itertools.product(range(num_parts), repeat=len(weights))
        )
        # Largest differencing never exceeds 4/3 of the optimum.
        assert max(sum(weights[i] for i in part) for part in parts) <= 4 / 3 * best


def test_karmarkar_karp_takes_the_textbook_example_apart():
    """8, 7, 6, 5, 4 into two: differencing leaves 2, where the optimum is 0."""
    from bench_batching import karmarkar_karp

    parts = karmarkar_karp([8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_pipeline_of_equal_microbatches_takes_the_known_time(num_stages, count):
    from bench_batching import BACKWARD, pipeline_time

    assert pipeline_time([2.0] * count, num_stages) == (count + num_stages - 1) * 2.0 * (1.0 + BACKWARD)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ([[[0]], [[1]]], "exactly once"),
        ([[[0, 1]], [[2]]], "beyond the budget"),
        ([[[0], []], [[1], [2], []]], "different numbers"),
    ],
)
def test_check_rejects_invalid_plans(plan, reason):
    from bench_batching import check

    with pytest.raises(RuntimeError, match=reason):
        check(plan, [5, 6, 7], 10)


def test_all_planners_are_checked_and_timed():
    from bench_batching import PLANNERS, long_tailed_lengths, measure, seven_billion_cost

    lengths = long_tailed_lengths(200, median=300, sigma=1.0, longest=3000)
    table = measure(Console(quiet=True), lengths, 4, 4096, cost=seven_billion_cost(), num_stages=2, repeats=1)
    assert table.row_count == len(PLANNERS)
