"""Statistics of several samples per prompt: the mean with its standard error, and the expected best of k."""

import math
from collections.abc import Sequence


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best score of k samples drawn without replacement from the prompt's n; unbiased for k fresh samples.

    For scores of 0 and 1, c of them 1, this is 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1). In general the i-th
    smallest score is the best in C(i-1, k-1) of the C(n, k) draws.

    Raises:
        ValueError: k is not within [1, n].
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= the number of samples {n}, got k={k}")
    total = math.comb(n, k)
    return math.fsum(score * (math.comb(i, k - 1) / total) for i, score in enumerate(sorted(scores)))


def powers_up_to(n: int) -> list[int]:
    """Powers of two up to n, and n itself: the values of k for which pass@k is reported."""
    return sorted({*(1 << i for i in range(n.bit_length())), n})


def mean_and_error(prompt_means: Sequence[float]) -> tuple[float, float]:
    """Mean over prompts and its standard error; nan if there are too few prompts.

    Only prompts are independent. The samples of one prompt count through their mean, so the error is valid even if
    these samples are correlated.
    """
    n = len(prompt_means)
    mean = math.fsum(prompt_means) / n if n else math.nan
    if n < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in prompt_means) / (n - 1)
    return mean, math.sqrt(variance / n)
