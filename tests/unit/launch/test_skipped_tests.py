"""A run of the tests ends with what was skipped, and with the claims that are therefore not proved."""

from types import SimpleNamespace

from tests.conftest import not_proved


def test_skipped_tests_are_listed_by_reason_with_the_claims_of_their_files(tmp_path):
    (tmp_path / "test_apples.py").write_text('"""Apples are round.\n\nMore about apples."""\n')
    reports = [SimpleNamespace(nodeid=f"test_apples.py::test_{i}", longrepr=("", 1, "Skipped: none here")) for i in range(3)]
    reports += [SimpleNamespace(nodeid="test_pears.py", longrepr=("", 1, "Skipped: no\ntree"))]
    assert not_proved(reports, tmp_path) == [
        "3 skipped: none here",
        "    3 of test_apples.py: Apples are round.",
        "1 skipped: no tree",
        "    1 of test_pears.py: no claim",
    ]
