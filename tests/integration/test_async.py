"""Windows that are generated ahead (schedule.mode=async) by a real SGLang server: overlap, staleness, kill and resume."""

import os
import signal

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.simulation.comparison import replay_measured
from megatron_rl.simulation.recorded import read_run
from megatron_rl.simulation.scenario import scenario_of
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.timeline import read_timeline
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("async"))


@pytest.fixture(scope="module")
def whole(folder):
    status, output = run(folder, "train", f"run.output_dir={folder}/whole", *OPTIONS)
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


def test_the_schedule_of_the_run_is_that_of_the_simulator(whole):
    replayed = replay_measured(read_run(whole), scenario_of(load_config(whole / "config.yaml")))
    assert abs(replayed.error) < 0.1


def test_a_killed_run_goes_on_as_the_same_run_bit_for_bit(folder, whole):
    output_dir = folder / "killed"
    command = ("train", f"run.output_dir={output_dir}", "run.resume=auto", *OPTIONS)
    process = start(folder, *command)
    try:
        saved = output_dir / "checkpoints" / "step-2" / "manifest.json"
        wait_until(lambda: saved.exists() and len(read_metrics(output_dir / "metrics.jsonl")) >= 3, process, "step 3")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)  # what it started dies with it
    finally:
        stop_tree(process)
    status, output = run(folder, *command)
    assert status == 0 and "goes on after step" in output, output
    assert differences(output_dir, whole) == []
