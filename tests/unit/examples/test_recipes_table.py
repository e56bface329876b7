"""Laws of examples/recipes/table.py: accuracy over time with the errors of seeds and problems."""

import json

import pytest

from megatron_rl.tracking.metrics_file import MetricsWriter
from tests.unit.examples.test_arms_table import load
from tests.unit.examples.test_comparison import write_policy


def evaluated(folder, accuracy, note=None, error=0.02):
    write_policy(folder, None, note)
    metrics = {"eval/accuracy": accuracy, "eval/accuracy_stderr": error}
    (folder / "evaluation.json").write_text(json.dumps({"settings": {}, "metrics": metrics}))


def write_run(folder, curve, *, windows=False):
    (folder / "policy").mkdir(parents=True)
    for step, (second, accuracy) in enumerate(curve.items(), start=1):
        evaluated(folder / "policies" / f"step-{step}", accuracy, {"step": step, "trained_s": second})
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        for step in (1, 2):
            tokens = {"advantage/unfinished_tokens": 30.0 if windows else 0.0, "advantage/finished_tokens": 70.0}
            stds = {"advantage/unfinished_std": 0.1 * step, "advantage/finished_std": 0.2} if windows else {}
            times = {"step/time_s": float(step), "time/rollout_idle_share": 0.3 * step, "time/trainer_idle_share": 0.1}
            metrics.log(step, tokens | stds | times)


@pytest.fixture
def folder(tmp_path):
    evaluated(tmp_path / "sft", 0.2)
    for seed, end in ((1, 0.5), (2, 0.6)):
        write_run(tmp_path / "runs" / f"grpo-{seed}", {5.0: 0.4, 10.0: end})
    write_run(tmp_path / "runs" / "tppo-1", {6.0: 0.5, 12.0: 0.9}, windows=True)
    return tmp_path


def test_a_row_is_at_fixed_seconds_with_the_errors_of_seeds_and_problems(folder, monkeypatch, capsys):
    table = load("recipes_table", "recipes/table.py", monkeypatch)
    assert table.main([str(folder / "runs"), "--start", str(folder / "sft")]) == 0
    printed = capsys.readouterr().out
    # 0.05 over seeds and 0.02 over problems; the common end is that of the shortest run.
    # Idle shares by time: (1 s x 30 % + 2 s x 60 %) / 3 s.
    assert "| `grpo` | 2 | 2 | 5.00 | 50% | 10% | 20.0 % | 30.0 ± 2.0 % | 40.0 ± 2.0 % | 47.5 ± 3.2 % | 55.0 ± 5.4 % |" in printed
    assert printed.index("`tppo`") < printed.index("`grpo`") and "| `tppo` | 1 | 2 | 6.00 | 50% | 10% | 20.0 %" in printed
    assert "`tppo`: 30% of the trained tokens" in printed and "of 0.150, those of the others 0.200" in printed
    assert "`grpo`: " not in printed


def test_recipes_table_reports_missing_runs_and_evaluations(folder, monkeypatch, capsys):
    table = load("recipes_table", "recipes/table.py", monkeypatch)
    assert table.main([str(folder), "--start", str(folder / "sft")]) == 2
    assert "no finished run" in capsys.readouterr().err
    (folder / "runs" / "tppo-1" / "policies" / "step-2" / "evaluation.json").unlink()
    assert table.main([str(folder / "runs"), "--start", str(folder / "sft")]) == 2
    assert "step-2/evaluation.json is missing" in capsys.readouterr().err
