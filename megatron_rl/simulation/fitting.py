"""Least squares with coefficients of at least 0, in which single disturbed measurements count little."""

import numpy as np


def nonnegative(features: np.ndarray, targets: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """[features] coefficients >= 0 of least weighted squares (Lawson and Hanson's active set, 1974).

    features: [rows, features]; targets, weights: [rows].
    """
    scale = np.ones(len(targets)) if weights is None else np.sqrt(weights)
    matrix, wanted = features * scale[:, None], targets * scale
    norms = np.linalg.norm(matrix, axis=0)
    matrix = matrix / np.where(norms > 0, norms, 1.0)
    num_features = matrix.shape[1]
    chosen = np.zeros(num_features, dtype=bool)
    found = np.zeros(num_features)
    for _ in range(10 * num_features):
        gradient = matrix.T @ (wanted - matrix @ found)
        gradient[chosen | (norms == 0)] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10 * max(float(np.abs(wanted).max(initial=0.0)), 1e-300):
            break
        chosen[best] = True
        while True:
            trial = np.zeros(num_features)
            trial[chosen] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            bad = chosen & (trial <= 0)
            if not bad.any():
                break
            ratios = found[bad] / np.maximum(found[bad] - trial[bad], 1e-300)
            found = found + float(ratios.min()) * (trial - found)
            chosen &= found > 1e-14
            found[~chosen] = 0.0
            if not chosen.any():
                trial = np.zeros(num_features)
                break
        found = trial
    return found / np.where(norms > 0, norms, 1.0)


def robust(features: np.ndarray, targets: np.ndarray, weights: np.ndarray, *, num_rounds: int = 8) -> np.ndarray:
    """As ``nonnegative``, with Huber's weights: beyond 2 deviations a row counts with its residual's first power."""
    found = nonnegative(features, targets, weights)
    for _ in range(num_rounds):
        residuals = np.abs(targets - features @ found) * np.sqrt(weights)
        deviation = 1.4826 * float(np.median(residuals))
        if deviation <= 0:
            break
        found = nonnegative(features, targets, weights * np.minimum(1.0, 2 * deviation / np.maximum(residuals, 1e-300)))
    return found


def usual_mean(values: np.ndarray) -> float:
    """The mean without what lies more than 4 deviations from the median: a disturbed machine, a first call that compiles."""
    middle = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - middle)))
    kept = np.abs(values - middle) <= 4 * deviation + 1e-9
    return float(values[kept].mean())
