"""`doctor --invariance`: tolerances by dtype and device; the table fits a narrow terminal."""

import io

import pytest
from rich.console import Console

from megatron_rl.desk.doctor.layout_comparison import (
    LayoutResult,
    Tolerances,
    default_dtype,
    differing,
    findings_table,
    tolerances_for,
)


def test_figures_and_short_names_do_not_wrap_in_80_columns() -> None:
    rows = [
        LayoutResult("reference", 1, 8.705087, 123.4567, 0.0, "reference"),
        LayoutResult("tp2+sp+pp2+vpp2+ep2+etp1+cp2+layers1/2/3/4", 16, 8.705087, 0.01234567, 1.2e-7, "DIFFERS: loss, weights"),
    ]
    output = io.StringIO()
    Console(file=output, width=80).print(findings_table(rows))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for whole in ("reference", "8.705087", "123.4567", "0.01234567", "1.2e-07"):
        assert any(whole in line for line in lines), whole


def test_tolerances_grow_with_the_rounding_of_the_dtype() -> None:
    def bounds(dtype: str, **where: bool) -> Tolerances:
        return tolerances_for(dtype, **{"on_gpu": True, "has_engine": True, "has_experts": False, **where})

    exact = bounds("float32", on_gpu=False, has_engine=False, has_experts=True)
    assert exact.loss == exact.grad_norm == exact.weights == 1e-5
    plain, tf32, half = bounds("float32", has_engine=False), bounds("float32"), bounds("bfloat16")
    for name in ("loss", "grad_norm", "weights"):
        values = [getattr(one, name) for one in (exact, plain, tf32, half)]
        assert values == sorted(set(values)), name
    assert half.weights < bounds("bfloat16", has_experts=True).weights < 1
    assert (default_dtype(has_engine=True), default_dtype(has_engine=False)) == ("bfloat16", "float32")


BASE = {"loss": 5.0, "grad_norm": 2.0, "difference": 0.0}
NOISE = {"loss": 5.0 * (1 + 2e-4), "grad_norm": 2.0 * (1 - 2.6e-3), "difference": 0.023}
"""Largest differences measured between layouts of a dense model in bfloat16."""


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (NOISE, []),
        ({**NOISE, "grad_norm": 2.0 * 1.05}, ["gradient norm"]),
        ({**NOISE, "loss": 5.0 * 1.01}, ["loss"]),
        ({**NOISE, "difference": 0.5}, ["weights"]),  # one tensor's gradient halved
        ({**NOISE, "difference": float("nan")}, ["weights"]),
    ],
)
def test_bfloat16_tolerances_pass_noise_and_reject_faults(row: dict[str, float], expected: list[str]) -> None:
    half = tolerances_for("bfloat16", on_gpu=True, has_engine=True, has_experts=False)
    assert differing(row, BASE, half) == expected
    assert differing(NOISE, BASE, tolerances_for("float32", on_gpu=False, has_engine=False, has_experts=False))
