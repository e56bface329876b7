"""The grounding reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.rules import grounding

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
