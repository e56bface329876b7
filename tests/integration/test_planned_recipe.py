"""A recipe that `megatron-rl plan` wrote is trained as it stands."""

import subprocess
import sys

from megatron_rl.cli import main
from megatron_rl.tracking.metrics_file import read_metrics
from tests.integration.preloaded import preloading
from tests.integration.test_train import RECIPE, TIMEOUT_S, make_task


def test_a_planned_recipe_trains(tmp_path, capsys):
    make_task(tmp_path)
    recipe, written = tmp_path / "asked.yaml", tmp_path / "planned.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    keys = [f"run.output_dir={tmp_path / 'run'}", "run.num_steps=1", "tracking.mlflow=false"]
    assert main(["plan", str(recipe), *keys, "--gpus", "2", "--lengths", "fixed:length=9", "--write", str(written)]) == 0
    told = capsys.readouterr()
    assert "before it trains" not in told.err and "s a" in told.out
    with preloading():
        done = subprocess.run(
            [sys.executable, "-m", "megatron_rl.cli", "train", "--config", str(written)],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row.step for row in rows] == [0, 1], "the evaluation before training, and a step"
