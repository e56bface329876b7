"""Token colors of a stored response: by advantage, weight version or mismatch. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TokenColor = tuple[int, int, int]
"""Red, green and blue, 0 to 255, light enough for black text."""
GOOD, BAD, APART = (88, 196, 110), (240, 110, 100), (245, 170, 60)
VERSIONS = ((140, 190, 245), (245, 205, 120), (205, 175, 245), (130, 215, 210), (245, 175, 205), (200, 200, 150))
"""Colors of weight versions, used cyclically."""
PAPER = (236, 236, 232)


@dataclass(frozen=True)
class Coloring:
    """Colors of a response's tokens, with their legend."""

    of_tokens: list[TokenColor | None]
    """[tokens] colors; None for a token without a value or one that did not train."""
    legend: tuple[tuple[str, TokenColor], ...]


def token_colors(row: Mapping[str, Any], by: str) -> Coloring:
    """Colors for the tokens of ``row``, which comes from ``whole_rows``. ``by``: advantage, version, mismatch or none."""
    length = row["length"]
    legend: tuple[tuple[str, TokenColor], ...]
    if by == "advantage":
        advantages = advantages_of(row)
        scale = _scale(np.abs(advantages))
        legend = ((f"+{scale:.2g}", GOOD), (f"-{scale:.2g}", BAD), ("0", PAPER))
        return Coloring([_shade(one / scale, GOOD, BAD) for one in advantages.tolist()], legend if np.isfinite(advantages).any() else ())
    if by == "mismatch":
        gaps = np.abs(mismatch_of(row))
        scale = _scale(gaps)
        legend = ((f"{scale:.2g} difference", APART), ("0", PAPER))
        return Coloring([_shade(one / scale, APART, APART) for one in gaps.tolist()], legend if np.isfinite(gaps).any() else ())
    if by == "version":
        colors: list[TokenColor | None] = []
        versions = sorted({s["weight_version"] for s in row["segments"] if s["role"] != "environment" and s["num_tokens"]})
        for segment in row["segments"]:
            color = None if segment["role"] == "environment" else VERSIONS[segment["weight_version"] % len(VERSIONS)]
            colors += [color] * segment["num_tokens"]
        return Coloring(colors, tuple((f"weights {version}", VERSIONS[version % len(VERSIONS)]) for version in versions))
    return Coloring([None] * length, ())


def advantages_of(row: Mapping[str, Any]) -> np.ndarray:
    """Advantages [tokens]; NaN for a token that did not train."""
    return np.where(np.array(row["mask"], bool), np.array(row["advantages"], np.float64), np.nan)


def mismatch_of(row: Mapping[str, Any]) -> np.ndarray:
    """The trainer's log-probs minus the server's [tokens]."""
    return np.array(row["trainer_logprobs"], np.float64) - np.array(row["rollout_logprobs"], np.float64)


def _scale(sizes: np.ndarray) -> float:
    """Value drawn in full color: nearly the largest, because a single outlier would make all others pale."""
    finite = sizes[np.isfinite(sizes)]
    return float(np.quantile(finite, 0.98)) or float(finite.max()) or 1.0 if len(finite) else 1.0


def _shade(share: float, positive: TokenColor, negative: TokenColor) -> TokenColor | None:
    """A color between paper at 0 and full color at 1 or -1; None for NaN."""
    if share != share:
        return None
    full, part = (positive if share > 0 else negative), min(abs(share), 1.0)
    red, green, blue = (round(empty + (color - empty) * part) for empty, color in zip(PAPER, full, strict=True))
    return red, green, blue
