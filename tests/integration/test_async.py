"""Windows that are generated ahead (schedule.mode=async) by a real SGLang server, which all runs here attach to: overlap,
staleness, kill and resume, weights published between windows and into them.
"""

import os
import signal
from contextlib import contextmanager
from itertools import groupby

import pytest
import requests

from megatron_rl.config.load import load_config
from megatron_rl.desk.simulate.recorded_run import read_run
from megatron_rl.desk.simulate.scenario import make_scenario
from megatron_rl.desk.simulate.simulation_request import replay_measured
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.run.checkpoint_folder import read_driver
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.samples_file import read_samples, sample_files
from megatron_rl.tracking.timeline import read_timeline
from tests.integration.preloaded import serving
from tests.integration.test_train import make_task, run, start, stop_tree, wait_until
from tests.same_runs import differences

OPTIONS = (
    "schedule.mode=async",
    "run.num_steps=6",
    "run.save_every_steps=2",
    "parallel.num_ranks=1",
    "data.eval_files=[]",
    "eval.sets={}",
    "tracking.mlflow=false",
)

MEASURED_COLUMNS = ["rollout_logprobs", "logprob", "mismatch"]
"""Columns of stored responses that follow the server's log-probs, whose last bits depend on the contents of its prefix cache."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("async"))


@pytest.fixture(scope="module")
def server(folder):
    options = ServerOptions(str(folder / "model"), deterministic=True, load_weights=False)
    with serving(SglangServer(options, folder / "sglang.log", start_timeout_s=400.0)) as server:
        yield server


@pytest.fixture(scope="module")
def options(server):
    return (*OPTIONS, f"rollout.urls=[{server.url}]")


@contextmanager
def slowed_down(server, seconds_per_token):
    def set_to(seconds):
        requests.post(f"{server.url}/slow_down", json={"forward_sleep_time": seconds}, timeout=30).raise_for_status()

    set_to(seconds_per_token)
    try:
        yield
    finally:
        set_to(None)


@pytest.fixture(scope="module")
def whole(folder, options):
    status, output = run(folder, "train", f"run.output_dir={folder}/whole", *options)
    assert status == 0, output
    return folder / "whole"


def test_a_window_is_generated_between_the_two_publishes_before_its_step(whole):
    spans = {(span.name, span.step): span for span in read_timeline(whole / "timeline.json")}
    for step in range(2, 6):
        generate = spans["generate", step + 1]
        assert spans["publish", step - 1].end_s <= generate.start_s and generate.end_s <= spans["publish", step].start_s
    rows = {row.step: row.metrics for row in read_metrics(whole / "metrics.jsonl")}
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    # The policy rests in the first step: the weights of the first two windows are those of the start.
    assert [rows[step]["rollout/staleness_max"] for step in rows] == [0, 0, 1, 1, 1, 1]
    for step, row in rows.items():
        assert row["rollout/num_slots"] == 16 and row["mismatch/k3"] < 0.1 and row["mismatch/weight_mean"] > 0.5
        if step < 6:
            assert rows[step + 1]["rollout/num_carried"] == 16 - row["rollout/num_finished"]
    assert rows[2]["mismatch/max_abs_log_ratio"] < 1e-3 < rows[4]["mismatch/max_abs_log_ratio"]


def test_the_runs_schedule_equals_the_simulators(whole):
    replayed = replay_measured(read_run(whole), make_scenario(load_config(whole / "config.yaml")))
    assert abs(replayed.error) < 0.1


def kill_and_resume(folder, output_dir, *words):
    """Kill a run after the checkpoint of step 2 and a third step, and let it end."""
    command = ("train", f"run.output_dir={output_dir}", "run.resume=auto", *words)
    process = start(folder, *command)
    try:
        saved = output_dir / "checkpoints" / "step-2" / "manifest.json"
        wait_until(lambda: saved.exists() and len(read_metrics(output_dir / "metrics.jsonl")) >= 3, process, "step 3")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)  # what it started dies with it
    finally:
        stop_tree(process)
    status, output = run(folder, *command)
    assert status == 0 and "resumes after step" in output, output


def test_a_killed_run_resumes_as_the_same_run_bit_for_bit(folder, whole, options):
    output_dir = folder / "killed"
    kill_and_resume(folder, output_dir, *options)
    assert differences(output_dir, whole) == []
    stored = [read_samples(sample_files(path).values()).drop_columns(MEASURED_COLUMNS) for path in (output_dir, whole)]
    assert stored[0].num_rows == 6 * 16 and repr(stored[0].to_pylist()) == repr(stored[1].to_pylist())  # NaN is NaN


def test_two_windows_ahead_are_two_updates_old_and_a_killed_run_resumes_bit_for_bit(folder, options):
    """The checkpoint has two windows whose weights no longer exist; they train as in the run that was not killed."""
    more = (*options, "schedule.max_staleness=2")
    status, output = run(folder, "train", f"run.output_dir={folder}/two-ahead", *more)
    assert status == 0, output
    whole = folder / "two-ahead"
    rows = {row.step: row.metrics for row in read_metrics(whole / "metrics.jsonl")}
    # The policy rests in the first step.
    assert [rows[step]["rollout/staleness_mean"] for step in rows] == [0, 0, 1, 2, 2, 2]
    output_dir = folder / "two-ahead-killed"
    kill_and_resume(folder, output_dir, *more)
    assert differences(output_dir, whole) == []


def test_weights_published_in_flight_reach_the_window_in_progress(folder, server, options):
    output_dir, words = folder / "in_flight", ("schedule.weight_update=in_flight", "run.keep_last=9", "run.save_every_steps=1")
    # So slow that on a busy machine, too, a publish ends while the window still has tokens to come.
    with slowed_down(server, 0.4):
        status, output = run(folder, "train", f"run.output_dir={output_dir}", *options, *words)
    assert status == 0, output
    spans = {(span.name, span.step): span for span in read_timeline(output_dir / "timeline.json")}
    met = [
        step
        for step in range(2, 6)
        if spans["generate", step + 1].start_s < spans["publish", step].start_s
        and spans["publish", step].end_s < spans["generate", step + 1].end_s
    ]
    assert met, "no publish came into a window: the servers are too fast for this machine"
    rows = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    assert all(row["rollout/num_slots"] == 16 and row["rollout/staleness_max"] <= 1 for row in rows.values())
    assert all(row["mismatch/k3"] < 0.1 for row in rows.values())
    # On a busy machine a publish may come just after the last token of a window.
    staleness = {step: rows[step + 1]["rollout/staleness_mean"] for step in met}
    assert all(0 < mean <= 1 for mean in staleness.values()) and min(staleness.values()) < 1
    for step in [step for step in met if staleness[step] < 1]:
        # The checkpoint holds the window that the publish came into, token by token of one version or the next.
        slots = read_driver(output_dir / "checkpoints" / f"step-{step}")["pool"]["slots"]
        window = [[s["weight_version"] for s in t["segments"] if s["step"] == step] for t in slots]
        assert {len(list(groupby(versions))) for versions in window} >= {2} and max(map(len, window)) <= 2
        assert all(versions == sorted(versions) for versions in window)


def test_a_run_killed_with_weights_in_flight_resumes_within_its_bounds(folder, server, options):
    """The position of a publish in a window depends on timing, so the resumed run differs; each token still trains once."""
    output_dir, words = folder / "killed_in_flight", ("schedule.weight_update=in_flight", "run.save_every_steps=1", "run.resume=auto")
    command = ("train", f"run.output_dir={output_dir}", *options, *words)
    with slowed_down(server, 0.05):
        process = start(folder, *command)
        try:
            saved = output_dir / "checkpoints" / "step-3" / "manifest.json"
            wait_until(saved.exists, process, "the checkpoint of step 3")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
        finally:
            stop_tree(process)
        status, output = run(folder, *command)
    assert status == 0 and "resumes after step" in output, output
    rows = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    assert all(row["rollout/num_slots"] == 16 and row["rollout/staleness_max"] <= 1 for row in rows.values())
    before: dict[int, dict] = {}
    for step, path in sorted(sample_files(output_dir).items()):
        now = {row["id"]: row for row in read_samples([path]).to_pylist()}
        assert len(now) == 16
        assert rows[step]["rollout/num_carried"] == sum(not row["finished"] for row in before.values())
        for id, row in now.items():
            earlier, old = before.get(id, {"token_ids": []})["token_ids"], row["length"] - row["new_tokens"]
            assert row["token_ids"][:old] == earlier and not any(row["mask"][:old])
            versions = [segment["weight_version"] for segment in row["segments"]]
            assert versions == sorted(versions)
        before = now
    assert any(any(row["mask"]) for row in before.values())


def test_rollout_workers_and_mapped_arrays_change_no_bit(folder, options):
    """Two replicas: one of them has its tokens from the worker's file, or from the driver's where there is no worker."""
    found = []
    for number in (0, 1):
        found.append(folder / f"workers-{number}")
        words = ("parallel.num_ranks=2", "run.num_steps=3", f"rollout.num_workers={number}", f"run.output_dir={found[-1]}")
        status, output = run(folder, "train", *options, *words)
        assert status == 0 and "cannot map" not in output, output
    assert differences(*found) == []
