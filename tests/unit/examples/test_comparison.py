"""Laws of examples/long_tail/compare.py: what is read from run folders, what is left out, what is refused, what is published."""

import json
import math
import re
import sys

import numpy as np
import pytest

from megatron_rl.config.load import config_to_yaml, load_config
from megatron_rl.tracking.metrics_file import MetricsRow, MetricsWriter
from megatron_rl.tracking.timeline import Span, Timeline
from tests.unit.examples.test_examples import ROOT

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "long_tail")]
import compare as comparison  # noqa: E402
from comparison_picture import HEADLINE, PUBLISHED, published  # noqa: E402


def write_policy(folder, accuracy, note=None):
    folder.mkdir(parents=True)
    if accuracy is not None:
        (folder / "evaluation.json").write_text(json.dumps({"settings": {}, "metrics": {"eval/accuracy": accuracy}}))
    if note:
        (folder / "kept.json").write_text(json.dumps(note))


def write_run(folder, curve, *, window=0, num_steps=12, finished=(8.0,), step_s=2.0):
    """A run of steps that generate for three quarters of their time and train for a quarter. ``curve``: second -> accuracy."""
    folder.mkdir(parents=True)
    config = load_config([], ["preset=tppo", f"batch.window_tokens={window}", "batch.max_response_tokens=100"])
    (folder / "config.yaml").write_text(config_to_yaml(config))
    (folder / "policy").mkdir()
    spans = []
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.log(0, {"eval/accuracy": 0.0}, time_s=1000.0)
        for step in range(1, num_steps + 1):
            start = 1000.0 + (step - 1) * step_s
            spans += [
                Span("generate", "rollout", start, start + 0.75 * step_s, step),
                Span("update_policy", "trainer", start + 0.75 * step_s, start + step_s, step),
            ]
            row = {"step/time_s": step_s, "step/tokens_generated": 100.0}
            row["rollout/num_finished"] = finished[min(step, len(finished)) - 1]
            metrics.log(step, row, time_s=start + step_s)
    Timeline(spans=spans).write(folder / "timeline.json")
    for number, (second, accuracy) in enumerate(curve.items(), start=1):
        write_policy(folder / "policies" / f"step-{number}", accuracy, {"step": number, "trained_s": second})
    return folder


@pytest.fixture
def folder(tmp_path):
    """PPO reaches what T-PPO reaches in twice the time; T-PPO's seeds finish nothing in the first four windows."""
    write_policy(tmp_path / "sft", 0.2)
    for seed, shift in enumerate((0.0, 0.01, -0.01), start=1):
        write_run(tmp_path / "runs" / f"ppo-{seed}", {10.0: 0.3 + shift, 20.0: 0.4 + shift}, finished=(4.0,))
        slow_start = (0.0, 0.0, 0.0, 0.0, 8.0)
        curve = {5.0: 0.3 + shift, 10.0: 0.4 + shift, 20.5: 0.5 + shift}
        write_run(tmp_path / "runs" / f"tppo-25-{seed}", curve, window=25, finished=slow_start)
    return tmp_path


def run(folder, *arguments):
    return comparison.main([str(folder / "runs"), "--start", str(folder / "sft"), *arguments])


def test_the_steady_state_begins_when_the_longest_response_could_have_ended(folder):
    found = comparison.read_run(folder / "runs" / "tppo-25-1", 0.2)
    assert found.speed["finished_per_s"] == 4.0 and found.speed["s_per_finished"] == 0.25
    assert found.speed["tokens_per_s"] == 50.0 and found.speed["s_per_step"] == 2.0
    assert (found.speed["rollout_idle"], found.speed["trainer_idle"]) == pytest.approx((0.25, 0.75))
    assert found.accuracy.values.tolist() == [0.2, 0.3, 0.4, 0.5] and found.accuracy.times[-1] == 20.5
    short = write_run(folder / "runs" / "tppo-1-1", {20.0: 0.5}, window=1, num_steps=8, finished=(0.0, 0.0, 0.0, 0.0, 8.0))
    one = comparison.read_run(short, 0.2)
    assert one.speed["finished_per_s"] == 4.0 and found.is_steady and not one.is_steady


def test_idle_shares_are_those_of_a_fine_clock():
    rng = np.random.default_rng(2)
    spans = [Span("x", lane, s, s + d, 1) for lane in ("rollout", "trainer") for s, d in rng.uniform(0, 9, (6, 2))]
    clock = np.linspace(2, 12, 100_001)[:-1]
    for lane in ("rollout", "trainer"):
        busy = np.zeros(len(clock), dtype=bool)
        for span in spans:
            busy |= (span.lane == lane) & (clock >= span.start_s) & (clock < span.end_s)
        assert comparison.idle_share(spans, lane, 2, 12) == pytest.approx(1 - busy.mean(), abs=1e-3)


def test_speed_is_of_the_sums_and_not_the_mean_of_the_steps():
    steps = ((1.0, 10.0), (9.0, 10.0))
    rows = [
        MetricsRow(k, 10.0, {"step/time_s": s, "rollout/num_finished": n, "step/tokens_generated": n})
        for k, (s, n) in enumerate(steps)
    ]
    assert comparison.steady_speed(rows, [])["finished_per_s"] == 2.0


def test_arms_are_compared_over_the_same_seconds_and_written_down(folder, capsys):
    assert run(folder, "--points", "20") == 0
    printed = capsys.readouterr().out
    found = json.loads((folder / "comparison.json").read_text())
    assert list(found["accuracy"]) == ["ppo", "tppo-25"] and found["grid"] == pytest.approx(list(np.linspace(0, 20, 21)))
    assert found["levels"] == pytest.approx([0.3, 0.35, 0.38])
    assert [one["value"] for one in found["times_faster"]["tppo-25"]] == pytest.approx([2.0] * 3)
    assert found["times_finished"]["tppo-25"]["value"] == pytest.approx(2.0)
    assert found["mean_accuracy"]["ppo"]["value"] == pytest.approx(0.3)
    more = found["more_accuracy"]["tppo-25"]
    assert more["low"] <= more["value"] == pytest.approx(found["mean_accuracy"]["tppo-25"]["value"] - 0.3)
    assert "| `tppo-25` | 3 | 4.00 [4.00, 4.00]" in printed and printed.strip() == (folder / "comparison.md").read_text().strip()
    for name in ("comparison.svg", "comparison-dark.svg", "comparison.png"):
        assert (folder / name).stat().st_size > 5000


def test_more_seeds_of_one_arm_leave_the_pairs_to_those_that_both_have(folder):
    write_run(folder / "runs" / "tppo-25-9", {20.0: 0.9}, window=25)
    assert run(folder) == 0
    found = json.loads((folder / "comparison.json").read_text())
    assert found["num_seeds"] == {"ppo": 3, "tppo-25": 4}
    assert found["times_faster"]["tppo-25"][-1]["value"] == pytest.approx(2.0)


def test_of_several_baselines_the_best_counts_at_every_level_and_in_every_resample(folder):
    """A second baseline starts fast and ends low: it holds the first level, ``ppo`` the last."""
    for seed, shift in enumerate((0.0, 0.01, -0.01), start=1):
        curve = {4.0: 0.3 + shift, 8.0: 0.35 + shift, 20.0: 0.36 + shift}
        write_run(folder / "runs" / f"ppo-32-{seed}", curve, finished=(5.0,))
    assert run(folder, "--baselines", "ppo", "ppo-32", "--points", "20") == 0
    found = json.loads((folder / "comparison.json").read_text())
    times = {name: [one["value"] for one in found["time_to_level"][name]] for name in ("ppo", "ppo-32", "tppo-25")}
    best = [min(pair) for pair in zip(times["ppo"], times["ppo-32"], strict=True)]
    assert best[0] == times["ppo-32"][0] and best[2] == times["ppo"][2]
    faster = found["times_faster"]["tppo-25"]
    assert [one["value"] for one in faster] == pytest.approx([a / b for a, b in zip(best, times["tppo-25"], strict=True)])
    assert all(one["low"] <= one["value"] <= one["high"] for one in faster) and "ppo-32" not in found["times_faster"]
    assert found["times_finished"]["tppo-25"]["value"] == pytest.approx(8.0 / 5.0)


def test_a_reader_can_compute_the_figures_from_the_numbers_of_each_run(folder):
    assert run(folder) == 0
    found = json.loads((folder / "comparison.json").read_text())
    runs = found["runs"]["tppo-25"]
    assert runs["1"]["trained_s"] == [0.0, 5.0, 10.0, 20.5] and runs["2"]["accuracy"] == [0.2, 0.31, 0.41, 0.51]
    assert np.mean([one["finished_per_s"] for one in runs.values()]) == found["speed"]["tppo-25"]["finished_per_s"]["value"]


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        (lambda f: (f / "sft" / "evaluation.json").unlink(), (), "sft/evaluation.json is missing"),
        (lambda f: None, ("--baselines", "grpo"), "no run of 'grpo' among ppo, tppo-25"),
        (lambda f: None, ("--arms", "ppo", "async"), "no finished run of async"),
        (lambda f: None, ("--seconds", "60"), "has trained for 20.0 s only"),
        (lambda f: write_run(f / "runs" / "x-1", {20.0: 0.5}, num_steps=2), (), "its first 2 are no steady state"),
        (lambda f: write_run(f / "runs" / "x-1", {}), (), "run.keep_policy_every_s"),
    ],
)
def test_runs_that_cannot_be_compared_are_rejected_with_a_reason(folder, change, arguments, words, capsys):
    change(folder)
    assert run(folder, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_has_not_come_to_its_end_is_no_run(folder):
    unfinished = write_run(folder / "runs" / "ppo-4", {5.0: 0.3})
    (unfinished / "policy").rmdir()
    assert run(folder) == 0
    assert json.loads((folder / "comparison.json").read_text())["num_seeds"]["ppo"] == 3


def read_published():
    """The published comparison with the classes that compare.py prints."""

    def restored(value):
        if isinstance(value, dict) and value.keys() == {"value", "low", "high", "relation"}:
            bounds = {"low": -math.inf, "high": math.inf}
            return comparison.Estimate(**{key: bounds.get(key) if one is None else one for key, one in value.items()})
        if isinstance(value, dict):
            return {name: restored(one) for name, one in value.items()}
        return [restored(one) for one in value] if isinstance(value, list) else value

    return comparison.Comparison(**restored(json.loads(PUBLISHED.read_text())))


def test_published_pictures_are_drawn_from_the_published_comparison():
    """Stale? python examples/long_tail/comparison_picture.py"""
    assert len(HEADLINE) <= 4
    for name, content in published().items():
        assert PUBLISHED.with_name(name).read_text() == content, f"{name} is stale"


def test_published_tables_are_those_of_the_published_comparison():
    found = read_published()
    rows = [line for line in comparison.tables(found).splitlines() if line.startswith("|")]
    task, benchmarks = ((ROOT / name).read_text() for name in ("examples/long_tail/README.md", "docs/benchmarks.md"))
    assert [row for row in rows if row not in task] == []
    assert [row for row in rows[2 + len(found.num_seeds) :] if row not in benchmarks] == []


def test_quoted_speedups_are_those_of_the_published_comparison():
    found = read_published()
    one, whole = found.times_finished["tppo-384"], found.times_finished["whole-96"]
    page = " ".join((ROOT / "README.md").read_text().split())
    assert f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}] times" in page
    separate = [faster for faster in found.times_faster["tppo-384"] if faster.low > 1]
    quoted = [whole, *found.times_faster["whole-96"], *separate]
    assert [f for f in quoted if f"{f.value:.2f} [{f.low:.2f}, {f.high:.2f}]" not in page] == []
    for name in ("docs/benchmarks.md", "examples/long_tail/README.md"):
        assert re.search(rf"{one.value:.2f}\b.*windows of 384, {whole.value:.2f}\b", " ".join((ROOT / name).read_text().split()))


def test_numbers_say_what_is_a_bound():
    estimate = comparison.Estimate
    assert comparison.text(estimate(0.5, 0.25, 0.75), 100, 1, " %") == "50.0 [25.0, 75.0] %"
    assert comparison.text(estimate(120.0, 120.0, math.inf, ">"), 1, 0, " s") == ">120 [120, open] s"
    assert comparison.text(estimate(math.nan, 0.0, math.inf), 1, 2) == "unknown [0.00, open]"
    assert comparison.text(estimate(2.0, -math.inf, math.inf), 1, 1) == "2.0"
