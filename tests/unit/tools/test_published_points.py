"""Estimates against published measurements, row by row: tools/published_points.py lists the rows with their sources."""

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"
sys.path.insert(0, str(TOOLS))
import published_points  # noqa: E402

sys.path.remove(str(TOOLS))
POINTS = published_points.points()
REQUIRED = "A1 A2 A5 A7 B1 B2 B3 B4 C1 C4 C10 C11 D1 D5".split()
"""Points that must be within their bounds, except for those in ``EXCEPT``."""
EXCEPT = {"step, 32 H20, colocated", "point to point of Kimi-K2"}


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.name}-{point.what}")
def test_published_point_is_within_its_bound_or_has_a_reason(point):
    assert "@" in point.source
    assert (abs(point.error()) > point.within) == bool(point.why), f"{point.error():+.1%} of {point.within:.1%}: {point.source}"
    if point.is_fitted:
        assert abs(point.error()) < 0.15
    if point.name in REQUIRED and not point.what.startswith(tuple(EXCEPT)):
        assert not point.why


def test_all_required_points_are_listed():
    assert {point.name for point in POINTS} >= set(REQUIRED)


def test_page_shows_the_computed_table():
    page = published_points.PAGE.read_text()
    shown = page.partition(published_points.BEGIN)[2].partition(published_points.END)[0]
    assert shown.strip() == published_points.table(POINTS)
