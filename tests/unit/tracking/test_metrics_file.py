"""Metrics survive kills and full disks."""

import math
import tracemalloc

import pytest

from megatron_rl.tracking import metrics_file
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


@pytest.mark.parametrize("replacement", [None, b"of another program"])
def test_a_removed_or_replaced_file_is_rewritten_with_all_its_lines(tmp_path, replacement):
    file = tmp_path / "metrics.jsonl"
    warnings = []
    with MetricsWriter(file, warn=warnings.append) as writer:
        for step in range(1, 4):
            if step == 3:
                file.unlink()
                if replacement:
                    file.write_bytes(replacement)
            writer.log(step, {"a": float(step)})
    assert [row.metrics for row in read_metrics(file)] == [{"a": 1.0}, {"a": 2.0}, {"a": 3.0}]
    assert len(warnings) == 1


def test_late_metrics_join_the_line_of_their_step_or_follow_it_where_the_file_cannot_be_rewritten(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file, warn=lambda text: None) as writer:
        for step in (1, 2, 11):
            writer.log(step, {"a": float(step)})
        for step in (1, 11, 7):
            writer.add_to(step, {"late": float(step)})
        rows = {row.step: row.metrics for row in read_metrics(file)}
        assert rows == {1: {"a": 1.0, "late": 1.0}, 2: {"a": 2.0}, 11: {"a": 11.0, "late": 11.0}, 7: {"late": 7.0}}

        def full(path, content):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(metrics_file, "write_atomic", full)
        writer.add_to(2, {"late": 2.0})
    assert [row.metrics for row in read_metrics(file) if row.step == 2] == [{"a": 2.0}, {"late": 2.0}]


def test_a_writer_keeps_no_line_in_memory(tmp_path):
    numbers = {f"metric/{i}": 1.0 / (i + 1) for i in range(100)}
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.log(0, numbers)
        tracemalloc.start()
        for step in range(1, 501):
            writer.log(step, numbers)
        kept_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert kept_bytes < 20_000 < (tmp_path / "metrics.jsonl").stat().st_size / 50
