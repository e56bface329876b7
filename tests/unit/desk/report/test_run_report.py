"""The report's panels of lengths, ranks, memory and idle times; the page of several runs."""

import re

import pytest

from megatron_rl.cli import main
from megatron_rl.desk.report.resource_panels import finished_lengths
from megatron_rl.desk.report.run_comparison import write_comparison
from megatron_rl.desk.report.run_record import load_run
from megatron_rl.desk.report.run_report import write_report
from megatron_rl.tracking.metrics_file import MetricsWriter
from megatron_rl.tracking.timeline import Span, Timeline


def write_run(folder, *, config="run: {num_steps: 8}\n", reward=0.1, num_steps=8):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    timeline = Timeline()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, num_steps + 1):
            writer.log(step, {
                "reward/mean": reward * step, "step/time_s": 60.0, "step/tokens_per_s": 10.0, "time/generate_s": 2.0 + reward,
                "time/rollout_idle_share": 0.25, "time/trainer_idle_share": 0.5, "memory/update_policy_host_gib": 3.25,
                "eval/accuracy": reward, "time/update_policy_s": 1.0,
            })  # fmt: skip
            rows = {"rows": 3, "tokens": 9, "prompt": "1 1 1", "held": "0 10 20", "new": f"{step} 5 5", "ended": "1 0 1", "ms": "1 1 1"}
            timeline.add(Span("generate", "rollout", step * 10.0, step * 10.0 + 2, step, {"rounds": [rows]}))
            work = {"rank_s": f"0:{step}.0 1:1.5 7:2.5"}
            timeline.add(Span("update_policy", "trainer", step * 10.0 + 2, step * 10.0 + 3, step, work))
    timeline.write(folder / "timeline.json")
    return folder


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL))


def test_lengths_are_of_finished_responses_only(tmp_path):
    spans = load_run(write_run(tmp_path / "run")).spans
    assert sorted(finished_lengths(spans, {1, 8})) == [1, 8, 25, 25]
    old = Span("generate", "rollout", 0.0, 1.0, 1, {"rounds": [{"rows": 3, "held": "1 2", "new": "1"}]})
    assert len(finished_lengths([old, Span("score", "host", 0.0, 1.0, 1)], {1})) == 0


def test_report_shows_lengths_ranks_memory_and_idle_times(tmp_path):
    words = text_of(write_report(write_run(tmp_path / "run")).read_text())
    for text in ("Lengths", "median 16.5", "update_policy: rank 0 takes", "at most 3.25 GiB, update_policy"):
        assert text in words, text
    assert "median: servers 25 %, trainer 50 %" in words
    # Rank 0 takes 4.5 s on average, ranks 1 and 7 take 1.5 and 2.5.
    assert f"{4.5 / ((4.5 + 1.5 + 2.5) / 3) - 1:.0%} more than the mean" in words


def test_comparison_shows_differences_between_recipes(tmp_path):
    config = "policy: {path: m, optimizer: {lr: %s}}\nrun: {seed: %d, output_dir: %s}\n"
    a = write_run(tmp_path / "a", config=config % ("1.0e-6", 1, "x"), reward=0.1)
    b = write_run(tmp_path / "b", config=config % ("2.0e-6", 1, "y"), reward=0.05)
    words = text_of(write_comparison([a, b], tmp_path / "page.html").read_text())
    recipe = words.split("Differences between the recipes")[1].split("Over training time")[0]
    assert "policy.optimizer.lr 1e-06 2e-06" in recipe and "run.seed" not in recipe and "output_dir" not in recipe and "path" not in recipe
    table = words.split("Runs")[1].split("Differences between")[0]
    assert "8 min 00 s" in table and "25%" in table and "3.25 GiB (host)" in table and "5.0%" in table
    for title in ("Reward", "minutes of training", "Idle share: servers", "Stage times", "Lengths", "Host memory"):
        assert title in words, title
    assert "Entropy" not in words and not any(file.name == "comparison.html" for file in a.iterdir())


def test_comparison_tells_equal_names_apart_and_rejects_duplicate_folders(tmp_path, capsys):
    a, b = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", num_steps=1)
    words = text_of(write_comparison([a, b], tmp_path / "page.html").read_text())
    assert "a/run" in words and "b/run" in words and "The recipes are the same" in words
    assert main(["report", str(a), str(a), "--output", str(tmp_path / "no.html")]) == 2
    assert main(["report", str(a), str(tmp_path / "gone")]) == 2
    errors = capsys.readouterr().err
    assert "twice" in errors and "expected the output folder of a run" in errors


@pytest.mark.parametrize("empty", ["", "{}\n"])
def test_comparison_of_empty_runs_makes_a_page(tmp_path, empty):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(empty)
    words = text_of(write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html").read_text())
    assert "2 runs" in words and "No run has a config.yaml" in words


def test_report_command_writes_to_its_output_path(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--output", str(tmp_path / "else.html")]) == 0
    assert (tmp_path / "else.html").is_file() and not (run / "report.html").exists()
    assert capsys.readouterr().out.strip() == str(tmp_path / "else.html")


def test_timeline_omits_the_pause_before_a_resume(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4)
    later = [Span("generate", "rollout", 5000.0 + 10 * step, 5002.0 + 10 * step, step) for step in (5, 6)]
    Timeline(spans=[*load_run(folder).spans, *later]).write(folder / "timeline.json")
    picture = write_report(folder).read_text().split("A few steps in detail")[1]
    assert "generate 5" in picture and "generate 4" not in picture


def test_report_is_self_contained_and_omits_missing_panels(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 9):
            writer.log(step, {"reward/mean": step / 10, "eval/accuracy": step / 10, "step/time_s": 1.0})
    page = write_report(tmp_path).read_text()
    assert "<script src" not in page and "http://" not in page.replace("http://www.w3.org", "")
    assert "80.0" in page and "svg" in page
    assert "Evaluation by set" not in page and "Best of k" not in page


def test_report_draws_evaluation_sets_and_best_of_k_with_standard_errors(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 4):
            numbers = {f"eval/{name}accuracy{what}": 0.3 for name in ("", "aime/", "math/") for what in ("", "_stderr")}
            writer.log(step, numbers | {f"eval/pass@{k}": k / 10 for k in (1, 2, 4)})
    page = write_report(tmp_path).read_text()
    assert "Evaluation by set" in page and "Best of k" in page and "aime" in page and "pass@4" in page
    assert "30.0% ± 30.0%" in page
