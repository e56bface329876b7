"""Real MLflow: what is logged arrives; a store that does not answer is one warning."""

import sqlite3
import time

from megatron_rl.tracking.sinks.mlflow import MLflowStore
from megatron_rl.tracking.sinks.tracker import Tracker


def open_tracker(folder, warnings, **options):
    return Tracker(MLflowStore(folder, params={"batch.window_tokens": 28}, **options), warn=warnings.append)


def test_params_metrics_and_artifacts_are_stored_and_a_resumed_run_continues(tmp_path):
    warnings = []
    (tmp_path / "config.yaml").write_text("a: 1\n")
    tracker = open_tracker(tmp_path, warnings)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.log_artifact(tmp_path / "config.yaml")
    tracker.close(timeout_s=120.0)
    again = open_tracker(tmp_path, warnings, resume=True)
    again.log(2, {"reward/mean": 0.75})
    again.close(timeout_s=120.0)
    assert warnings == []
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        runs = store.execute("select run_uuid, status from runs").fetchall()
        metrics = store.execute("select step, value from metrics where key = 'reward/mean' order by step").fetchall()
        params = dict(store.execute("select key, value from params"))
    assert len(runs) == 1 and runs[0][1] == "FINISHED"
    assert metrics == [(1, 0.5), (2, 0.75)] and params["batch.window_tokens"] == "28"
    assert [path.name for path in (tmp_path / "mlflow_artifacts").rglob("config.yaml")] == ["config.yaml"]


def test_an_unreachable_store_is_a_warning_and_blocks_no_caller(tmp_path):
    warnings = []
    tracker = open_tracker(tmp_path, warnings, uri="http://127.0.0.1:9")
    started_s = time.monotonic()
    for step in range(200):
        tracker.log(step, {"reward/mean": 0.5})
    assert time.monotonic() - started_s < 5.0
    tracker.close(timeout_s=3.0)
    assert any("MLflow" in text for text in warnings)
