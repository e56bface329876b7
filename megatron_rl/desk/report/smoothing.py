"""The exponential mean with which charts and health checks filter the noise of single steps."""

import math

import numpy as np


def smoothing_span(num_steps: int) -> int:
    """Steps that a smoothed line averages over: a twentieth of the run, at least 5."""
    return max(5, num_steps // 20)


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Exponential mean over about ``span`` values, bias-corrected for the start. [N] -> [N]; NaN is skipped."""
    keep = 1.0 - 2.0 / (span + 1.0)
    total = weight = 0.0
    smoothed = np.full(len(values), np.nan)
    for index, value in enumerate(values):
        if math.isfinite(value):
            total = keep * total + (1.0 - keep) * float(value)
            weight = keep * weight + (1.0 - keep)
        if weight:
            smoothed[index] = total / weight
    return smoothed
