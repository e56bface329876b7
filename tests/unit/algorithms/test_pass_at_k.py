"""pass@k and the standard error over prompts, against brute force."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import mean_and_error, pass_at_k
from megatron_rl.algorithms.pass_at_k import powers_up_to

SCORES = st.lists(st.floats(-2, 2), min_size=1, max_size=8)


@given(scores=SCORES, data=st.data())
def test_pass_at_k_is_the_mean_best_over_all_subsets(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    best = [max(subset) for subset in itertools.combinations(scores, k)]
    assert pass_at_k(scores, k) == pytest.approx(math.fsum(best) / len(best), abs=1e-12)


@given(n=st.integers(1, 200), data=st.data())
def test_pass_at_k_of_binary_scores_is_the_papers_estimator(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    expected = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k([1.0] * c + [0.0] * (n - c), k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased():
    """The estimator's exact expectation over 5 samples of probability p equals the expected best of k fresh samples."""
    p, n = 0.3, 5
    for k in range(1, n + 1):
        expectation = sum(
            math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k([1.0] * c + [0.0] * (n - c), k) for c in range(n + 1)
        )
        assert expectation == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize("k", [0, -1, 4])
def test_pass_at_k_rejects_k_above_the_number_of_samples(k):
    with pytest.raises(ValueError, match="1 <= k <= the number of samples 3"):
        pass_at_k([1.0, 0.0, 0.0], k)


def test_reported_ks_are_powers_of_two_and_the_sample_count():
    assert [powers_up_to(n) for n in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 8]]


@given(values=st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_standard_error_is_deviation_over_root_of_prompts(values):
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-12)


def test_mean_and_error_are_nan_with_too_few_prompts():
    assert mean_and_error([0.5])[0] == 0.5 and math.isnan(mean_and_error([0.5])[1])
    assert all(map(math.isnan, mean_and_error([])))
