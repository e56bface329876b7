"""Costs found again in runs that were made with them, and what they predict."""

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.desk.simulate.calibration import _fitted, calibrated, with_trained
from megatron_rl.desk.simulate.fitting import nonnegative
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import Workload, compute_means, predict
from megatron_rl.desk.simulate.recorded_run import RecordedRun, prompt_lengths, read_run, response_lengths
from megatron_rl.desk.simulate.scenario import make_scenario
from megatron_rl.desk.simulate.simulation_request import observed, recorded_works, replay_fitted, replay_measured
from megatron_rl.desk.simulate.slot_simulation import SlotProcess, trained_rows
from megatron_rl.desk.simulate.timing import read_timing, write_timing
from megatron_rl.errors import UserError
from tests.unit.desk.simulate.made_runs import LENGTHS, TIMING, make_config, make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name -> (run, scenario), all with the same costs and lengths."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {
        "sync": make_config("sync"),
        "window 96": make_config(),
        "window 192": make_config(window_tokens=192),
        "half the slots": make_config(num_prompts=16),
        "one window ahead": make_config("async"),
    }
    return {
        name: (read_run(make_run(folder / name, config, seed=seed)), make_scenario(config))
        for seed, (name, config) in enumerate(configs.items())
    }


def test_a_synchronous_run_gives_its_costs_back(runs):
    found = calibrated(*runs["sync"])
    nodes = np.array([1, 8, 16, 40, 64, 128])
    assert found.decode.seconds(nodes) == pytest.approx(TIMING.decode.seconds(nodes), rel=0.03)
    assert found.decode.context_token_s == pytest.approx(TIMING.decode.context_token_s, rel=0.05)
    for name in ("old_logprobs", "update_policy", "update_critic"):
        cost, true = found.stage(name), TIMING.stage(name)
        assert (cost.token_s, cost.update_s) == pytest.approx((true.token_s, true.update_s), rel=0.05)
        assert cost.cores == pytest.approx(true.cores, rel=0.02)
    assert found.stage("publish").fixed_s == pytest.approx(0.1, rel=0.01)
    checkpoint = found.stage("checkpoint")
    assert (checkpoint.fixed_s, checkpoint.update_s) == pytest.approx((0.01, 1.5), rel=0.01)


def test_a_stage_that_no_mixture_of_costs_explains_keeps_its_mean():
    """What is left of a generate stage may be below zero but for one step that was disturbed."""
    tokens, seconds = np.full(10, 100.0), np.array([-1.0] * 9 + [12.0])
    found = _fitted(seconds, token_s=tokens)
    assert np.mean(found.token_s * tokens) == pytest.approx(seconds.mean())


def test_calibration_separates_contention_from_longer_stages(runs):
    """In windows the critic slows generation down; the costs are those without it."""
    found = calibrated(*runs["window 96"])
    assert found.stage("update_critic").token_s == pytest.approx(TIMING.stage("update_critic").token_s, rel=0.05)
    assert found.stage("generate").cores == pytest.approx(1.2, rel=0.05)
    # Fewer than some 40 responses never run in these windows.
    assert found.decode.seconds(np.array([64])) == pytest.approx(TIMING.decode.seconds(np.array([64])), rel=0.1)


def test_a_run_in_which_nothing_overlaps_expects_what_overlaps_on_full_cores_to_be_slower(runs):
    """Generation and the trainer want 2.8 cores of 2; a machine with room for both slows neither down."""
    assert calibrated(*runs["sync"]).overlap_rate == 0.8
    spans = [
        replace(span, args=span.args | {"cores": 16} if "cores" in span.args else span.args)
        for span in runs["sync"][0].spans
    ]
    roomy = RecordedRun(runs["sync"][0].folder, spans)
    assert calibrated(roomy, runs["sync"][1]).overlap_rate == 1.0


@pytest.mark.parametrize("name", ["sync", "window 96", "one window ahead"])
def test_a_run_replays_its_own_seconds(runs, name):
    run, scenario = runs[name]
    assert abs(replay_measured(run, scenario).error) < 0.005
    if name == "one window ahead":
        return  # rows of a run in which all generation overlaps training say little of either alone
    assert abs(replay_fitted(run, scenario, calibrated(run, scenario)).error) < 0.02


@pytest.mark.parametrize("source", ["sync", "window 96"])
@pytest.mark.parametrize("target", ["sync", "window 96", "window 192", "half the slots", "one window ahead"])
def test_one_run_predicts_the_others(runs, source, target):
    """Over the rows that the other run really had, so that only the costs can be wrong."""
    timing = calibrated(*runs[source])
    # What a step with few responses costs, which is most of a synchronous run, windows do not say: it is a guess then.
    limit = 0.3 if (source, target) == ("window 96", "sync") else 0.06
    assert abs(replay_fitted(*runs[target], timing).error) < limit


def test_predictions_over_drawn_lengths_meet_a_run_with_the_same_lengths(runs):
    run, scenario = runs["window 96"]
    timing = calibrated(run, scenario)
    workload = Workload(response_lengths(run, carries=True), prompt_lengths(run))
    found = compute_means(predict(scenario, workload, timing, num_steps=150, seed=3))
    real = compute_means(observed(run, scenario, timing))
    assert found.step_s == pytest.approx(real.step_s, rel=0.06)
    assert found.finished_per_s == pytest.approx(real.finished_per_s, rel=0.1)
    assert found.prefix_share == pytest.approx(real.prefix_share, abs=0.04)


def test_work_is_read_from_the_rows(runs):
    run, scenario = runs["window 96"]
    works = recorded_works(run, scenario, TIMING)
    spans = [span for span in run.spans if span.name == "generate"]
    rounds = [span.args["rounds"][0] for span in spans]
    assert [work.new_tokens for work in works] == [one["tokens"] for one in rounds]
    assert [work.num_finished for work in works] == [one["ended"].split().count("1") for one in rounds]


@pytest.mark.parametrize("training_window", [None, 0, 97, 192, 300, 900])
def test_windows_of_training_are_read_from_rows_that_do_not_name_them(training_window):
    config = make_config()
    config.schedule.training_window_tokens = training_window
    scenario, rng = make_scenario(config), np.random.default_rng(3)
    slots = SlotProcess(scenario, named_lengths(LENGTHS).draw, named_lengths("fixed:length=9").draw, rng)
    for step in range(15):
        window = slots.generate(step, TIMING)
        unknown = np.zeros(len(window.generated), dtype=np.int64)
        rows = replace(window.generated, first_window=unknown, trained=unknown)
        found = trained_rows(with_trained(rows, scenario), scenario)
        assert found.new.tolist() == window.trained.new.tolist() and found.held.tolist() == window.trained.held.tolist()


def test_calibration_rejects_a_timeline_without_facts_of_the_stages(runs, tmp_path):
    run, scenario = runs["sync"]
    trace = json.loads((run.folder / "timeline.json").read_text())
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            event["args"] = {"step": event["args"]["step"]}
    (tmp_path / "timeline.json").write_text(json.dumps(trace))
    (tmp_path / "config.yaml").write_text((run.folder / "config.yaml").read_text())
    old = read_run(tmp_path)
    with pytest.raises(UserError, match="a run of an earlier version.*--replay"):
        calibrated(old, scenario)
    assert abs(replay_measured(old, scenario).error) < 0.005


@pytest.mark.parametrize("missing", ["config.yaml", "timeline.json"])
def test_read_run_reports_the_missing_file(runs, tmp_path, missing):
    for name in {"config.yaml", "timeline.json"} - {missing}:
        (tmp_path / name).write_text((runs["sync"][0].folder / name).read_text())
    with pytest.raises(UserError, match=f"{missing} does not exist"):
        read_run(tmp_path)


def test_costs_come_back_from_their_file(runs, tmp_path):
    write_timing(tmp_path / "costs.yaml", TIMING)
    assert read_timing(tmp_path / "costs.yaml") == TIMING


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decode: {running: [4, 2], step_s: [1, 2]}", "running must rise"),
        ("decode: {running: [1, 2], step_s: [1]}", "a value of step_s for each"),
        ("decoder: {}", "expected a mapping with any of decode, prefill"),
        ("stages: {publish: {fixed: 3}}", "stages.publish: expected a mapping with any of fixed_s"),
        ("stages: {publish: {fixed_s: -3}}", "stages.publish.fixed_s: expected a number of at least 0, got -3"),
        ("- 1", "expected a mapping"),
        ("{", "expected a YAML file of costs"),
    ],
)
def test_a_file_of_other_things_is_refused(tmp_path, text, said):
    (tmp_path / "costs.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_timing(tmp_path / "costs.yaml")


def test_least_squares_without_negative_parts_against_all_subsets():
    """The best of all subsets of columns whose own least squares have no negative coefficient."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        matrix, wanted = rng.normal(size=(12, 4)), rng.normal(size=12)
        best = float((wanted**2).sum())
        for subset in range(1, 16):
            columns = [j for j in range(4) if subset >> j & 1]
            part = np.linalg.lstsq(matrix[:, columns], wanted, rcond=None)[0]
            if (part >= 0).all():
                best = min(best, float(((matrix[:, columns] @ part - wanted) ** 2).sum()))
        found = nonnegative(matrix, wanted)
        assert (found >= 0).all() and float(((matrix @ found - wanted) ** 2).sum()) == pytest.approx(best, rel=1e-9)
