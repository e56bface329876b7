"""The report's charts: axes."""

import re

import numpy as np
import pytest

from megatron_rl.desk.report.charts import Series, line_chart


@pytest.mark.parametrize(("low", "high"), [(2.0, 3.0), (0.4, 6.0), (1e-8, 1e-2)])
def test_logarithmic_axis_has_several_labels(low, high):
    values = np.geomspace(low, high, 20)
    svg = line_chart([Series("a", "blue", np.arange(20), values)], "norm", log=True)
    labels = [float(label) for label in re.findall(r"<text[^>]*>([^<]+)</text>", svg) if re.fullmatch(r"[0-9.e+-]+", label)]
    assert len([label for label in labels if low * 0.9 <= label <= high * 1.1 and label not in range(0, 21, 5)]) >= 2
