"""The lengths that tools/bench_decode.py forces."""

import statistics

import pytest

from tools.bench_decode import pareto_scale, response_lengths


def test_a_cut_pareto_distribution_has_the_mean_asked_for():
    lengths = response_lengths("pareto:1.15,55,900", 40_000, seed=1)
    assert statistics.mean(lengths) == pytest.approx(55, rel=0.03)
    assert max(lengths) == 900 and min(lengths) == pytest.approx(pareto_scale(1.15, 55, 900), abs=1)


def test_a_lognormal_distribution_has_the_median_asked_for():
    lengths = response_lengths("lognormal:40,1.2,900", 20_000, seed=1)
    assert statistics.median(lengths) == pytest.approx(40, rel=0.05)
    assert max(lengths) == 900


def test_a_file_is_read_again_from_its_beginning(tmp_path):
    (tmp_path / "lengths").write_text("3 5\n7\n")
    assert response_lengths(str(tmp_path / "lengths"), 5, seed=0) == [3, 5, 7, 3, 5]


@pytest.mark.parametrize("spec", ["pareto:1.15,55", "pareto:1.15,900,55", "lognormal:-1,1,9", "pareto:a,b,c"])
def test_a_wrong_distribution_is_refused(spec):
    with pytest.raises(ValueError, match="expected"):
        response_lengths(spec, 3, seed=0)
