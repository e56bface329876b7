"""The lengths that tools/bench_decode.py forces."""

import statistics
from types import SimpleNamespace

import pytest

from tools.bench_decode import pareto_scale, prefill, response_lengths, step_times


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


def test_a_step_is_what_is_left_of_two_generations_and_prefill_sees_new_prompts():
    seen = []

    def run(prompts, counts):
        seen.append(prompts)
        return 0.5 + 0.002 * (counts[0] - 1), 0.1 + 0.001 * (counts[0] - 1)

    settings = SimpleNamespace(
        lengths_held=[8], sequences=[2], steps=10, repeats=2, vocab=64, prefill=[3, 5], engines=["ours"]
    )
    step, first = step_times({"ours": run}, settings)
    assert step["ms"]["ours"] == pytest.approx(2.0) and step["processor_ms"]["ours"] == pytest.approx(1.0)
    assert first["cell"] == "prefill 3 x 5" and first["ms"]["ours"] == pytest.approx(500)
    assert seen[-1] != seen[-2] and len(seen[-1]) == 3
    assert prefill({}, settings)["ms"] == {}
