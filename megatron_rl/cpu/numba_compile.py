"""Helpers of the compiled loops: compilation with a cache, and row chunks as lanes (``simd.py``)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

from megatron_rl.cpu.simd import (
    WIDTH,
    add,
    fma,
    greater,
    load,
    load_first,
    load_half,
    load_half_first,
    mul,
    power_of_two,
    splat,
    store,
    store_first,
    sub,
)
from megatron_rl.system.files.loop_cache import compiled_with_cache

_F = np.float32
Lanes = Any
"""Type of sixteen lanes, for annotations."""
ZERO, ONE, LOWEST = _F(0), _F(1), _F(-np.inf)
_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.py")))


def inlined(function: Callable[..., Any]) -> Any:
    """Compile ``function`` for inlining into other compiled functions."""
    return numba.njit(forceinline=True, error_model="numpy")(function)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile ``function`` at its first call, or load it from the cache."""
    return compiled_with_cache(function, _SOURCES, nogil=True, error_model="numpy")


# exp(x) = 2**n exp(r), r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2]; coefficients of Cephes' expf (relative error 1e-7).
_LOG2_E, _ROUNDER = _F(1.4426950408889634), _F(12582912.0)
_LN2_HIGH, _LN2_LOW = _F(-0.693359375), _F(2.12194440e-4)
_E5, _E4, _E3 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_E2, _E1, _E0 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_SMALLEST_EXPONENT = _F(-87.0)


@inlined
def exp(x: Lanes) -> Lanes:
    """exp of values up to 88; below -87 the result is exp(-87)."""
    x = greater(x, splat(_SMALLEST_EXPONENT))
    shifted = fma(x, splat(_LOG2_E), splat(_ROUNDER))
    n = sub(shifted, splat(_ROUNDER))
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), x))
    p = fma(splat(_E5), r, splat(_E4))
    p = fma(p, r, splat(_E3))
    p = fma(p, r, splat(_E2))
    p = fma(p, r, splat(_E1))
    p = fma(p, r, splat(_E0))
    return mul(add(fma(mul(r, r), p, r), splat(ONE)), power_of_two(shifted))


@inlined
def part_of(address: int, index: int, count: int, is_half: int) -> Lanes:
    """Lanes of a row from element ``index`` on; ``count`` elements are left, and lanes after them are zero."""
    if is_half:
        return load_half(address + 2 * index) if count >= WIDTH else load_half_first(address + 2 * index, count)
    return load(address + 4 * index) if count >= WIDTH else load_first(address + 4 * index, count)


@inlined
def store_lanes(address: int, index: int, count: int, value: Lanes) -> None:
    if count >= WIDTH:
        store(address + 4 * index, value)
    else:
        store_first(address + 4 * index, value, count)
