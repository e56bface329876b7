"""Follows docs/tutorial.md as a newcomer would: writes its files and runs its commands, with the shorter run that the page offers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.tracking.metrics_file import read_metrics
from tests.unit.docs.fences import ROOT, fences

PAGE = ROOT / "docs" / "tutorial.md"
HURRY = "run.num_steps=6"
"""Override that the page offers for a shorter run."""
RECIPE = "my_rl/recipe.yaml"
TIMEOUT_S = 500


def test_the_tutorial_ends_with_a_trained_model(tmp_path):
    blocks = fences(PAGE)
    assert f"`{HURRY}`" in PAGE.read_text()
    (tmp_path / "my_rl").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    for block in blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    commands = "".join(block.text for block in blocks if block.language == "bash")
    assert [line.split()[1] for line in commands.splitlines() if line.startswith("megatron-rl ")] == [
        "score", "train", "sft", "train", "samples", "evaluate",
    ]  # fmt: skip
    hurry = f'megatron-rl() {{ if [ "$1 ${{!#}}" = "train {RECIPE}" ]; then set -- "$@" {HURRY}; fi; command megatron-rl "$@"; }}\n'
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{hurry}{commands}"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    scored = [json.loads(line) for line in (tmp_path / "my_rl" / "scored.jsonl").read_text().splitlines()]
    assert [row["score"] for row in scored] == [1.0, 0.0, 0.0]
    rows = read_metrics(tmp_path / "outputs" / "brackets" / "run" / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(7)) and "reward/right_share" in rows[-1].metrics
    before, after = (float(found) / 100 for found in re.findall(r"^\d/2 outputs\S+: accuracy (\S+)%", done.stdout, re.MULTILINE))
    assert before < 0.2 and after > 0.6, done.stdout
    assert after == pytest.approx(rows[-1].metrics["eval/accuracy"])
