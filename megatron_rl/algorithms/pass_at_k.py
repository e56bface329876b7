"""What several samples of a prompt say of a policy: the mean with its error, and the best of k."""

import math
from collections.abc import Sequence


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best of k of the prompt's n samples, drawn without replacement; unbiased for k fresh samples.

    With scores 0 and 1, c of them 1, this is 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1). In general the i-th
    smallest score is the best of a draw in C(i-1, k-1) of C(n, k) cases. ValueError unless 1 <= k <= n.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= the number of samples {n}, got k={k}")
    total = math.comb(n, k)
    return math.fsum(score * (math.comb(i, k - 1) / total) for i, score in enumerate(sorted(scores)))


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... and n itself: the k of pass@k that are worth a number."""
    return sorted({*(1 << i for i in range(n.bit_length())), n})


def mean_and_error(prompt_means: Sequence[float]) -> tuple[float, float]:
    """Mean over prompts and its standard error, nan where there are too few prompts for one.

    Prompts are what is independent: the samples of one prompt count through their mean only, so the error holds
    however alike they are.
    """
    n = len(prompt_means)
    mean = math.fsum(prompt_means) / n if n else math.nan
    if n < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in prompt_means) / (n - 1)
    return mean, math.sqrt(variance / n)
