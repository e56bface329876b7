"""Metrics survive kills and full disks."""

import math

from megatron_rl.tracking.metrics_file import MetricsWriter, read_metrics


def test_metrics_round_trip_with_steps_and_non_finite_values(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as writer:
        writer.log(1, {"a": 1.5, "b": math.inf}, time_s=10.0)
        writer.log(2, {"a": math.nan}, time_s=11.0)
    one, two = read_metrics(file)
    assert (one.step, one.time_s, one.metrics) == (1, 10.0, {"a": 1.5, "b": math.inf})
    assert two.step == 2 and math.isnan(two.metrics["a"])


def test_torn_last_line_is_skipped_and_overwritten(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as writer:
        writer.log(1, {"a": 1.0})
    with open(file, "ab") as torn:
        torn.write(b'{"step": 2, "time_s": 3')
    assert [row.step for row in read_metrics(file)] == [1]
    with MetricsWriter(file) as writer:
        writer.log(2, {"a": 2.0})
    assert [row.step for row in read_metrics(file)] == [1, 2]


def test_resume_drops_the_lines_that_will_be_rewritten(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as writer:
        for step in range(6):
            writer.log(step, {"a": float(step)})
    with MetricsWriter(file, resume_step=4) as writer:
        writer.log(4, {"a": -1.0})
    assert [row.metrics["a"] for row in read_metrics(file)] == [0, 1, 2, 3, -1]
