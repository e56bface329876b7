"""Tolerances between layouts that compute the same, by device and dtype: sums in a different order round differently."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Tolerances:
    """Relative tolerances. Each measured figure and its margin are in docs/agreement.md."""

    loss: float
    grad_norm: float
    weights: float
    """Tolerance relative to a tensor's largest element after the update."""
    noticeable: float
    """Smallest weight change of the reference's update: below it the comparison is meaningless."""


_FLOAT32 = Tolerances(1e-5, 1e-5, 1e-5, noticeable=1e-4)
_FLOAT32_ON_GPU = Tolerances(1e-4, 1e-4, 1e-4, noticeable=1e-3)
"""Products are exact, but kernels depend on shapes."""
_TF32 = Tolerances(5e-4, 5e-3, 0.03, noticeable=0.1)
"""Transformer Engine computes float32 with 11-bit products."""
_BFLOAT16 = Tolerances(2e-3, 0.02, 0.1, noticeable=0.5)
_ROUTED_WEIGHTS = 0.5
"""Tolerance for models with experts: a rounding that reroutes one token changes the gradients of two experts."""


def default_dtype(*, has_engine: bool) -> str:
    """Default dtype of the check. ``has_engine``: layers are Transformer Engine's, which has no float32 attention under
    context parallelism."""
    return "bfloat16" if has_engine else "float32"


def tolerances_for(dtype: str, *, on_gpu: bool, has_engine: bool, has_experts: bool) -> Tolerances:
    if dtype == "float32" and not has_engine:
        return _FLOAT32_ON_GPU if on_gpu else _FLOAT32
    exact = _TF32 if dtype == "float32" else _BFLOAT16
    if not has_experts:
        return exact
    return Tolerances(exact.loss, exact.grad_norm, _ROUTED_WEIGHTS, noticeable=2 * _ROUTED_WEIGHTS)


def differing(row: Mapping[str, Any], base: Mapping[str, Any], bounds: Tolerances) -> list[str]:
    """Names of quantities that differ beyond their tolerance between two measurements of ``layout_ranks.py``."""
    errors = {
        "loss": (abs(row["loss"] - base["loss"]) / abs(base["loss"]), bounds.loss),
        "gradient norm": (abs(row["grad_norm"] - base["grad_norm"]) / base["grad_norm"], bounds.grad_norm),
        "weights": (row["difference"], bounds.weights),
    }
    return [name for name, (error, bound) in errors.items() if not error <= bound]
