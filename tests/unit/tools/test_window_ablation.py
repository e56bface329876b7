"""docs/tppo_windows.md holds what its script makes: tables from the kept figures, and figures from the simulation."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def ablation():
    sys.path.insert(0, str(ROOT / "tools"))
    import window_ablation

    return window_ablation


def test_the_tables_of_the_page_are_those_of_the_figures(ablation):
    """Stale? python tools/window_ablation.py --tables"""
    page = ablation.PAGE.read_text()
    assert ablation.with_tables(page, json.loads(ablation.FIGURES.read_text())) == page
    assert all(f"<!-- {name} -->" in page for name in ablation.TABLES)


@pytest.mark.parametrize(("tail", "slots"), [("lognormal 0.8", 512)])
def test_cells_come_out_as_they_are_kept(ablation, tail, slots):
    """Stale? python tools/window_ablation.py"""
    kept = json.loads(ablation.FIGURES.read_text())["cells"][tail][str(slots)]
    found = ablation.cells(tail, slots, {"1/2": ablation.WINDOWS["1/2"]})
    for share, places in found.items():
        for place, row in places.items():
            assert row["1/2"] == pytest.approx(kept[share][place]["1/2"], rel=2e-3)


def test_all_tails_have_the_same_mean(ablation):
    import numpy as np

    from megatron_rl.desk.simulate.lengths import named_lengths

    for words in ablation.TAILS.values():
        drawn = named_lengths(words).draw(np.random.default_rng(0), 100_000)
        assert drawn.mean() == pytest.approx(ablation.MEAN_TOKENS, rel=0.03) and drawn.max() <= ablation.BUDGET
