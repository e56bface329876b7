"""Robust least squares with nonnegative coefficients."""

from collections.abc import Mapping

import numpy as np

_PULL = 0.01
"""Weight of the expected coefficients, relative to the rows' weight times the rows' unexplained share."""
_PRIOR_WEIGHT = 0.25
"""Weight of a prior, in measurements."""


def nonnegative(features: np.ndarray, targets: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return [features] coefficients >= 0 of least weighted squares (Lawson and Hanson's active set, 1974).

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


def robust(
    features: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    *,
    expected: np.ndarray | None = None,
    num_rounds: int = 4,
) -> np.ndarray:
    """Same as ``nonnegative``, but with Huber's loss: quadratic up to residuals of 2 deviations, linear beyond.

    ``expected``: [features] coefficients of a weak ridge penalty, which decides where the rows do not.
    """
    anchors, anchored, anchor_weights = features[:0], targets[:0], weights[:0]
    if expected is not None:
        plain = nonnegative(features, targets, weights)
        unexplained = float((weights * (targets - features @ plain) ** 2).sum() / (weights * targets**2).sum())
        curvature = (weights[:, None] * features**2).sum(axis=0)
        pull = _PULL * unexplained * np.where(curvature > 0, curvature, curvature.max())
        anchors, anchored, anchor_weights = np.eye(len(expected)), expected, pull

    def fit(row_weights: np.ndarray) -> np.ndarray:
        rows, wanted = np.concatenate([features, anchors]), np.concatenate([targets, anchored])
        return nonnegative(rows, wanted, np.concatenate([row_weights, anchor_weights]))

    found = fit(weights)
    for _ in range(num_rounds):
        residuals = np.abs(targets - features @ found) * np.sqrt(weights)
        deviation = 1.4826 * float(np.median(residuals))
        if deviation <= 0:
            break
        found = fit(weights * np.minimum(1.0, 2 * deviation / np.maximum(residuals, 1e-300)))
    return found


def mixture(units: Mapping[str, np.ndarray], measured: np.ndarray, prior: Mapping[str, float]) -> dict[str, float]:
    """Fit the seconds per unit, at least 0, with which the ``units`` explain the ``measured`` seconds; the mean is met exactly.

    units: name -> [measurements] amounts. ``prior``: seconds of the mean expected for each unit; they decide if the
    measurements are too alike to separate the units.
    """
    mean = float(measured.mean())
    matrix = np.stack(list(units.values()), axis=1)
    expected = np.array([prior[name] for name in units])
    deviation = max(1.4826 * float(np.median(np.abs(measured - np.median(measured)))), 0.02 * mean)
    weights = np.concatenate([np.full(len(measured), deviation**-2), np.full(len(expected), _PRIOR_WEIGHT * mean**-2)])
    rows = np.concatenate([matrix, np.diag(matrix.mean(axis=0))])
    found = robust(rows, np.concatenate([measured, expected]), weights)
    # Outlier steps count little in the shape, but they are part of the steps' mean time on this node.
    explained = float((matrix @ found).mean())
    found = found * mean / explained if explained > 0 else expected / np.maximum(matrix.mean(axis=0), 1e-300)
    return dict(zip(units, found.tolist(), strict=True))
