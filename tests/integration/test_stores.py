
"""Real TensorBoard and Weights & Biases (offline): what is logged arrives, once per step, also over kills; failures are warnings."""

import json
import sqlite3
import struct
import sys
import time
from dataclasses import replace
from functools import partial

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config, RunConfig
from megatron_rl.tracking.metrics_file import MetricsWriter, read_metrics
from megatron_rl.tracking.sinks.all_trackers import (
    TensorBoardStore,
    TrackerSet,
    WandbStore,
    start_new_runs,
    tracked_evaluation,
)
from megatron_rl.tracking.sinks.mlflow import MLflowStore
from megatron_rl.tracking.sinks.tracker import Tracker

STEPS = {1: {"reward/mean": 0.5, "policy/kl": float("nan")}, 2: {"reward/mean": 0.75}, 3: {"reward/mean": 0.875}}


def log_steps(folder, make_store, steps, *, resume_step=None, ends=True):
    """Record one part of a run as the recorder does; returns the warnings."""
    warnings = []
    with MetricsWriter(folder / "metrics.jsonl", resume_step=resume_step or 0) as writer:
        before = read_metrics(folder / "metrics.jsonl")
        tracker = Tracker(make_store(resume=resume_step is not None), before=before, warn=warnings.append)
        for step in steps:
            writer.log(step, STEPS[step], time_s=100.0 + step)
            tracker.log(step, STEPS[step], time_s=100.0 + step)
        if ends:
            tracker.close(timeout_s=60.0)
        else:  # as a killed process leaves it, but for the library's own buffers
            tracker.wait_until_sent(lambda: None)
            assert not warnings
    return warnings


def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def store(*, resume):
        return TensorBoardStore(tmp_path)

    assert log_steps(tmp_path, store, [1, 2, 3], ends=False) == []
    (tmp_path / "tensorboard" / "notes.txt").write_text("the user's")
    # The checkpoint was that of step 1: 2 and 3 are repeated.
    assert log_steps(tmp_path, store, [2, 3], resume_step=2) == []
    files = list((tmp_path / "tensorboard").glob("events*"))
    assert len(files) == 1 and (tmp_path / "tensorboard" / "notes.txt").exists()
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=False).Reload()
    assert [(e.step, e.value, e.wall_time) for e in events.Scalars("reward/mean")] == [
        (1, 0.5, 101.0), (2, 0.75, 102.0), (3, 0.875, 103.0)
    ]  # fmt: skip
    assert "policy/kl" in events.Tags()["scalars"]


def wandb_rows(folder):
    """(run id, logged rows) of every offline run of the folder, read from what `wandb sync` would upload."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        rows = []
        for content in leveldb_records(file.read_bytes()):
            record = messages.Record.FromString(content)
            if record.HasField("history"):
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        found.append((file.stem.removeprefix("run-"), rows))
    return found


def whole_wandb_rows(folder, number):
    """``wandb_rows`` once ``number`` are there: W&B's process writes its last block after ``finish`` has returned."""
    deadline_s = time.monotonic() + 60
    while sum(len(rows) for _, rows in wandb_rows(folder)) < number and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return wandb_rows(folder)


def leveldb_records(data):
    """Records of a LevelDB log after W&B's header of 7 bytes: blocks of 32 KiB, parts of (checksum, size, kind, content)."""
    place, content = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        content += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, last
            yield content
            content = b""


def test_wandb_continues_the_same_run_and_repeats_no_step(tmp_path):
    pytest.importorskip("wandb")

    def store(*, resume):
        return WandbStore(tmp_path, mode="offline", project="p", params={"batch.window_tokens": 28, "x": [1]}, resume=resume)

    assert log_steps(tmp_path, store, [1, 2]) == []
    assert log_steps(tmp_path, store, [2, 3], resume_step=2) == []
    first, second = whole_wandb_rows(tmp_path, 3)
    assert first[0] == second[0] == json.loads((tmp_path / "wandb_run.json").read_text())["id"]
    logged = [(row["step"], row["reward/mean"]) for _, rows in (first, second) for row in rows]
    assert logged == [(1, 0.5), (2, 0.75), (3, 0.875)]


def test_after_a_rollback_the_stores_have_a_run_of_the_steps_that_count(tmp_path):
    pytest.importorskip("wandb")
    config = load_config(None, [f"run.output_dir={tmp_path}", "tracking.wandb=offline"])
    taken_back, again = {1: 0.5, 2: 0.1, 3: 0.0}, {2: 0.75, 3: 0.875}
    for resume, values, status in ((False, taken_back, "FAILED"), (True, again, "FINISHED")):
        with MetricsWriter(tmp_path / "metrics.jsonl", resume_step=2 if resume else 0) as writer:
            trackers = TrackerSet(config, resume=resume, warn=pytest.fail)
            for step, value in values.items():
                writer.log(step, {"reward/mean": value})
                trackers.log(step, {"reward/mean": value})
            trackers.close(status, timeout_s=120.0)
        if not resume:
            start_new_runs(tmp_path, "rolled_back_1.")
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        runs = dict(store.execute("select run_uuid, status from runs"))
        points = store.execute("select run_uuid, step, value from metrics where key = 'reward/mean' order by step").fetchall()
    newest = json.loads((tmp_path / "mlflow_run.json").read_text())["run_id"]
    first = json.loads((tmp_path / "rolled_back_1.mlflow_run.json").read_text())["run_id"]
    assert runs == {first: "FAILED", newest: "FINISHED"}
    assert [(step, value) for run, step, value in points if run == first] == list(taken_back.items())
    assert [(step, value) for run, step, value in points if run == newest] == list({**taken_back, **again}.items())
    rows = {run: [(row["step"], row["reward/mean"]) for row in logged] for run, logged in whole_wandb_rows(tmp_path, 6)}
    assert sorted(rows.values()) == sorted([list(taken_back.items()), list({**taken_back, **again}.items())])


def test_an_unreachable_wandb_server_is_a_warning(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("megatron_rl.tracking.sinks.all_trackers._INIT_TIMEOUT_S", 2.0)
    warnings = []
    tracker = Tracker(WandbStore(tmp_path, mode="online", project="p"), warn=warnings.append)
    started_s = time.monotonic()
    for step in range(200):
        tracker.log(step, {"reward/mean": 0.5})
    assert time.monotonic() - started_s < 5.0
    tracker.close(timeout_s=10.0)
    assert any("Weights & Biases" in text and "Training continues" in text for text in warnings)


def test_a_missing_library_is_one_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    warnings = []
    tracker = Tracker(WandbStore(tmp_path, mode="offline", project="p"), warn=warnings.append)
    tracker.log(1, {"a": 1.0})
    tracker.close()
    assert any("tracking.wandb=null" in text for text in warnings)


def test_mlflow_nests_runs_registers_models_and_stores_the_final_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MLflow puts the artifacts of such a store below the working directory
    uri, warnings, beats = f"sqlite:///{tmp_path}/mlflow.db", [], []
    model = tmp_path / "policy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for name, status in (("a", "FAILED"), ("b", "KILLED")):
        (tmp_path / name).mkdir()
        store = MLflowStore(tmp_path / name, uri=uri, parent="sweep", model="tiny")
        tracker = Tracker(store, warn=warnings.append)
        tracker.log_artifact(model)
        tracker.wait_until_sent(partial(beats.append, name), every_s=0.01)
        assert not tracker._queue
        tracker.close(status, timeout_s=120.0)
    assert warnings == [] and set(beats) == {"a", "b"}
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        runs = {name: (run, status) for run, name, status in database.execute("select run_uuid, name, status from runs")}
        parents = dict(database.execute("select run_uuid, value from tags where key = 'mlflow.parentRunId'"))
        versions = database.execute("select name, version, source, run_id from model_versions order by version").fetchall()
    assert {name: status for name, (_, status) in runs.items()} == {"sweep": "FINISHED", "a": "FAILED", "b": "KILLED"}
    assert parents == {runs["a"][0]: runs["sweep"][0], runs["b"][0]: runs["sweep"][0]}
    assert [(name, version, run) for name, version, _, run in versions] == [("tiny", 1, runs["a"][0]), ("tiny", 2, runs["b"][0])]


def test_an_evaluation_of_kept_policies_is_a_child_of_their_run(tmp_path):
    config = replace(Config(), run=RunConfig(output_dir=str(tmp_path)))
    warnings = []
    with tracked_evaluation(config, warnings.append) as nothing:
        assert nothing is None
    Tracker(MLflowStore(tmp_path), warn=warnings.append).close(timeout_s=60.0)
    run_file = (tmp_path / "mlflow_run.json").read_text()
    with pytest.raises(ValueError), tracked_evaluation(config, warnings.append) as tracker:
        tracker.log(20, {"eval/accuracy": 0.5})
        raise ValueError("a server died")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        ((child, parent, status),) = database.execute(
            "select t.run_uuid, t.value, r.status from tags t join runs r on r.run_uuid = t.run_uuid where key = 'mlflow.parentRunId'"
        ).fetchall()
        metrics = database.execute("select run_uuid, key, step, value from metrics").fetchall()
    assert parent == json.loads(run_file)["run_id"] and (tmp_path / "mlflow_run.json").read_text() == run_file
    assert metrics == [(child, "eval/accuracy", 20, 0.5)] and status == "FAILED" and warnings == []
