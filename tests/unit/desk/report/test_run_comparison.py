"""The page of several runs: tables, names and curves of each run."""

import re

import pytest

from megatron_rl.cli import main
from megatron_rl.desk.report.run_comparison import write_comparison
from megatron_rl.tracking.metrics_file import MetricsWriter
from tests.unit.desk.report.written_runs import text_of, write_run


def test_comparison_shows_differences_between_recipes(tmp_path):
    config = "policy: {path: m, optimizer: {lr: %s}}\nrun: {seed: %d, output_dir: %s}\n"
    a = write_run(tmp_path / "a", config=config % ("1.0e-6", 1, "x"), reward=0.1)
    b = write_run(tmp_path / "b", config=config % ("2.0e-6", 1, "y"), reward=0.05)
    words = text_of(write_comparison([a, b], tmp_path / "page.html").read_text())
    before, recipe = words.split("Differences between the recipes")
    assert "Over training time" in before and "Host memory" in before  # charts come before a long table
    assert "policy.optimizer.lr 1e-06 2e-06" in recipe and "run.seed" not in recipe and "output_dir" not in recipe and "path" not in recipe
    table = words.split("Runs")[1].split("Over training time")[0]
    assert "8 min 00 s" in table and "25%" in table and "3.25 GiB (host)" in table and "5.0%" in table
    for title in ("Reward", "minutes of training", "Idle share: servers", "Stage times", "Lengths", "Host memory"):
        assert title in words, title
    assert "Entropy" not in words and not any(file.name == "comparison.html" for file in a.iterdir())


def test_comparison_tells_equal_names_apart_and_rejects_duplicate_folders(tmp_path, capsys):
    a, b = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", num_steps=1)
    words = text_of(write_comparison([a, b], tmp_path / "page.html").read_text())
    assert "· a, b ·" in words and "a/run" not in words and "The recipes are the same" in words
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


def test_comparison_shows_the_median_of_the_steps_that_evaluated(tmp_path):
    for name, seconds in (("a", 3.0), ("b", 9.0)):
        (tmp_path / name).mkdir()
        with MetricsWriter(tmp_path / name / "metrics.jsonl") as writer:
            for step in range(1, 10):
                writer.log(step, {"time/evaluate_s": seconds if step == 5 else 0.0, "time/generate_s": 1.0})
    page = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html").read_text()
    axis = page.split("<h3>Stage times</h3>")[1].split("</svg>")[0]
    assert max(float(label) for label in re.findall(r">([0-9.]+)</text>", axis)) >= 8
