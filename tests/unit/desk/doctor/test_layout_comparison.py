"""`doctor --invariance`: its table fits a narrow terminal."""

import io

from rich.console import Console

from megatron_rl.desk.doctor.layout_comparison import LayoutResult, findings_table


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
