"""How far layouts may be apart that compute the same, by device and dtype: sums in another order round in another way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Tolerances:
    """Relative ones. A measured figure and its margin are in docs/agreement.md."""

    loss: float
    grad_norm: float
    weights: float
    """Of a tensor's largest element after the update."""
    noticeable: float
    """What the update of the reference has to move its weights by: one that does nothing agrees with everything."""


_FLOAT32 = Tolerances(1e-5, 1e-5, 1e-5, noticeable=1e-4)
_FLOAT32_ON_GPU = Tolerances(1e-4, 1e-4, 1e-4, noticeable=1e-3)
"""Exact products, but other kernels for other shapes."""
_TF32 = Tolerances(5e-4, 5e-3, 0.03, noticeable=0.1)
"""What Transformer Engine makes of float32: products of 11 bits."""
_BFLOAT16 = Tolerances(2e-3, 0.02, 0.1, noticeable=0.5)
_ROUTED_WEIGHTS = 0.5
"""With experts: a rounding that sends one token to another expert changes the gradients of both."""


def default_dtype(*, has_engine: bool) -> str:
    """``has_engine``: layers are Transformer Engine's, on a GPU. It has no attention for float32 with context parallelism."""
    return "bfloat16" if has_engine else "float32"


def tolerances_for(dtype: str, *, on_gpu: bool, has_engine: bool, has_experts: bool) -> Tolerances:
    if dtype == "float32" and not has_engine:
        return _FLOAT32_ON_GPU if on_gpu else _FLOAT32
    exact = _TF32 if dtype == "float32" else _BFLOAT16
    if not has_experts:
        return exact
    return Tolerances(exact.loss, exact.grad_norm, _ROUTED_WEIGHTS, noticeable=2 * _ROUTED_WEIGHTS)


def differing(row: Mapping[str, Any], base: Mapping[str, Any], bounds: Tolerances) -> list[str]:
    """Names of what is further apart than it may be, of two measurements of ``layout_ranks.py``."""
    errors = {
        "loss": (abs(row["loss"] - base["loss"]) / abs(base["loss"]), bounds.loss),
        "gradient norm": (abs(row["grad_norm"] - base["grad_norm"]) / base["grad_norm"], bounds.grad_norm),
        "weights": (row["difference"], bounds.weights),
    }
    return [name for name, (error, bound) in errors.items() if not error <= bound]
