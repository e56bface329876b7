"""The record of a run: its name, and its metrics as columns."""

import random

import numpy as np

from megatron_rl.desk.report.run_record import load_run, record_of
from megatron_rl.tracking.metrics_file import MetricsRow
from tests.unit.desk.report.written_runs import write_run


def test_general_folder_name_is_shown_with_its_parent(tmp_path):
    assert load_run(write_run(tmp_path / "tppo" / "run")).name == "tppo/run"
    assert load_run(write_run(tmp_path / "ppo")).name == "ppo"


def test_columns_hold_the_newest_value_of_each_step_whatever_the_order_and_number_of_its_lines():
    rng = random.Random(0)
    for _ in range(200):
        lines = [
            MetricsRow(rng.randrange(8), float(time), {name: rng.random() for name in rng.sample("abcd", rng.randrange(5))})
            for time in range(rng.randrange(12))
        ]
        run = record_of("run", iter(lines))
        assert list(run.steps) == sorted({row.step for row in lines})
        assert list(run.times_s) == [max(row.time_s for row in lines if row.step == step) for step in run.steps]
        for name in "abcd":
            newest = {row.step: row.metrics[name] for row in lines if name in row.metrics}
            np.testing.assert_array_equal(run.values(name), [newest.get(step, np.nan) for step in run.steps])
