"""The error of a rank that waited too long names the ranks that block it."""

import pytest

from megatron_rl.parallel.hang_report import RankActivity, describe_timeout

UPDATE = RankActivity(7, "update of the engine critic")
LATE = UPDATE._replace(gave_up=True)


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        (
            [LATE, RankActivity(6, "values of the engine critic"), LATE],
            "waited for rank 1 (which is at the values of the engine critic)",
        ),
        ([LATE, LATE, RankActivity(0, "")], "waited for rank 2 (which has begun nothing)"),
        ([LATE, UPDATE, LATE], "waited for rank 1 (which began it and has not come through)"),
        ([LATE, UPDATE, UPDATE], "waited for rank 1 (which began it and has not come through), rank 2 (which"),
        ([LATE, RankActivity(8, "export of the engine policy"), LATE], "others, as did every other rank that is in it"),
        (None, "does not answer"),
    ],
)
def test_the_report_names_ranks_that_are_behind_or_silent(notes, expected):
    said = describe_timeout(0, UPDATE, 2.0, notes)
    assert (
        said.startswith("rank 0 gave up 2 s into the update of the engine critic: it waited for") and expected in said
    )
