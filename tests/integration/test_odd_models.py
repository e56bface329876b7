"""Random odd models of every family: computed as transformers does, or refused in one line (tests/odd_models.py)."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fuzz import FUZZ_PROFILE
from tests.odd_models import FAMILIES, verdict

SEEDS = range(30 if settings.get_current_profile_name() == FUZZ_PROFILE else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_models_equal_transformers_or_are_refused_by_name(family: str, tmp_path: Path) -> None:
    verdicts = [verdict(tmp_path / "model", family, seed) for seed in SEEDS]
    assert [found for found in verdicts if found.result == "WRONG"] == []


def test_most_odd_models_are_accepted(tmp_path: Path) -> None:
    """The law above would hold for a program that refuses everything."""
    verdicts = Counter(verdict(tmp_path / "model", family, 77).result for family in ("llama", "qwen2", "qwen3", "mixtral"))
    assert verdicts["same"] >= 2, verdicts
