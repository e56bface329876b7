"""Distributions against their definitions; what cannot be is refused in words."""

import numpy as np
import pytest

from megatron_rl.desk.simulate.lengths import named_lengths, read_lengths
from megatron_rl.desk.simulate.recorded_run import product_limit
from megatron_rl.errors import UserError


def draws(words, count=200_000):
    return named_lengths(words).draw(np.random.default_rng(0), count)


def test_a_lognormal_has_its_median_and_spread_and_ends_at_its_max():
    found = draws("lognormal:median=2000,sigma=1,max=24576")
    assert np.median(found) == pytest.approx(2000, rel=0.02) and found.max() == 24576
    assert np.std(np.log(found[found < 24576])) == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize(
    "words", ["pareto:shape=1.15,mean=55,max=900", "lognormal:mean=300,sigma=1.2,max=900", "pareto:shape=3,mean=20"]
)
def test_a_mean_is_that_of_what_is_drawn(words):
    mean = float(words.split("mean=")[1].split(",")[0])
    assert draws(words).mean() == pytest.approx(mean, rel=0.02)


def test_a_pareto_falls_with_its_shape():
    found = draws("pareto:shape=1.5,min=10")
    assert np.mean(found > 100) == pytest.approx(10**-1.5, rel=0.05) and found.min() >= 10


def test_of_two_kinds_each_has_its_share():
    found = draws("bimodal:short=2000,sigma=0.5,share=0.1,long=24576")
    assert np.mean(found == 24576) == pytest.approx(0.1, abs=0.005) and np.median(
        found[found < 24576]
    ) == pytest.approx(2000, rel=0.02)


def test_fixed_uniform_and_normal():
    assert set(draws("fixed:length=800", 10)) == {800}
    found = draws("uniform:min=3,max=7")
    assert {3, 7} <= set(found) and set(found) == set(range(3, 8)) and found.mean() == pytest.approx(5, abs=0.02)
    assert draws("normal:mean=500,std=50").std() == pytest.approx(50, rel=0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gamma:shape=2", "'gamma' is neither a distribution nor a file; expected one of fixed:length"),
        ("lognormal:median=10", "it lacks 'sigma'"),
        ("lognormal:median=10,sigma=1,mx=4", "does not take mx"),
        ("lognormal:mean=900,sigma=1,max=500", "mean=900 is not below max=500"),
        ("pareto:shape=0.9,mean=50", "the mean is infinite without a max"),
        ("uniform:min=9,max=3", "min=9 is above max=3"),
        ("bimodal:short=20,share=1.5,long=90", "share=1.5 is more than 1"),
        ("fixed:length=-3", "expected key=value with a number above 0, got 'length=-3'"),
        ("fixed:length", "got 'length'"),
    ],
)
def test_named_lengths_reject_invalid_distributions(words, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        named_lengths(words)


def test_a_file_of_lengths_is_drawn_from(tmp_path):
    (tmp_path / "a.txt").write_text("3\n3\n9\n")
    np.save(tmp_path / "a.npy", np.array([3, 3, 9]))
    for name in ("a.txt", "a.npy"):
        found = read_lengths(tmp_path / name).draw(np.random.default_rng(0), 3000)
        assert set(found) == {3, 9} and np.mean(found == 3) == pytest.approx(2 / 3, abs=0.05)


@pytest.mark.parametrize("text", ["", "three\n", "4\n-1\n", "4\nnan\n"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "a.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a\.txt"):
        read_lengths(path)


def test_responses_that_were_still_going_on_do_not_make_lengths_shorter():
    """Exponential lengths, each watched for a random time: the product-limit estimate has their mean, the ended ones do not."""
    rng = np.random.default_rng(0)
    lengths, watched = rng.geometric(0.01, 40_000), rng.integers(1, 400, 40_000)
    seen, ended = np.minimum(lengths, watched), lengths <= watched
    values, shares = product_limit(seen, ended, np.ones(len(seen)))
    below = values < 350
    estimated, true = shares[below].cumsum(), 1 - 0.99 ** values[below]
    assert np.abs(estimated - true).max() < 0.02 and shares.sum() == pytest.approx(1)
    assert lengths[ended].mean() < 0.8 * lengths.mean()
