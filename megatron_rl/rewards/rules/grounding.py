"""Rewards ``bbox`` and ``point`` for visual grounding (Seed1.5-VL, arXiv 2505.07062).

A response contains ``<bbox>x1 y1 x2 y2</bbox>`` or ``<point>x y</point>``; numbers are separated by spaces or commas
and use the same coordinates as the ground truth. The last tag counts. Content that cannot be parsed as a box or a point
scores 0.
"""

import re

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import register

Box = tuple[float, float, float, float]
"""(x1, y1, x2, y2) with x1 < x2 and y1 < y2."""

_SEPARATOR = re.compile(r"[\s,]+")
_NUMBER = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?")


def _tag_content(text: str, tag: str) -> str | None:
    """Content of the last ``<tag>...</tag>``."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def _read_numbers(text: str, count: int) -> list[float] | None:
    # The length limit bounds the work on hostile responses.
    parts = _SEPARATOR.split(text.strip().strip("()[]").strip()) if len(text) <= 200 else []
    if len(parts) != count or not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    return [float(part) for part in parts]


def read_box(text: str | None) -> Box | None:
    numbers = _read_numbers(text, 4) if text is not None else None
    if numbers is None or numbers[0] >= numbers[2] or numbers[1] >= numbers[3]:
        return None
    return (numbers[0], numbers[1], numbers[2], numbers[3])


def _intersection_over_union(first: Box, second: Box) -> float:
    """Shared area over covered area, in [0, 1]."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return shared / (sum(areas) - shared)


def _truth_box(answer: str) -> Box | Score:
    box = read_box(_tag_content(answer, "bbox") or answer)
    expected = "expected x1 y1 x2 y2 with x1 < x2 and y1 < y2"
    return box or Score(None, error=f"the ground truth {answer[:80]!r} is not a box: {expected}")


@register("bbox", range=(0.0, 1.0))
def score_box(response: str, answer: str, *, min_iou: float = 0.0) -> Score:
    """Intersection over union of the response's box with the box ``answer``.

    Args:
        min_iou: If above 0, the reward is 1.0 for at least this overlap and 0.0 otherwise.
    """
    truth = _truth_box(answer)
    if isinstance(truth, Score):
        return truth
    box = read_box(_tag_content(response, "bbox"))
    if box is None:
        return Score(0.0, "no <bbox>x1 y1 x2 y2</bbox> in the response")
    iou = _intersection_over_union(box, truth)
    return Score(float(iou >= min_iou) if min_iou > 0 else iou, f"bbox {box}, IoU {iou:.3f}")


@register("point", range=(0.0, 1.0))
def score_point(response: str, answer: str) -> Score:
    """1.0 if the response's point is in the box ``answer``, including its border."""
    truth = _truth_box(answer)
    if isinstance(truth, Score):
        return truth
    content = _tag_content(response, "point")
    point = _read_numbers(content, 2) if content is not None else None
    if point is None:
        return Score(0.0, "no <point>x y</point> in the response")
    hit = truth[0] <= point[0] <= truth[2] and truth[1] <= point[1] <= truth[3]
    return Score(float(hit), f"point {point[0]:g} {point[1]:g}")
