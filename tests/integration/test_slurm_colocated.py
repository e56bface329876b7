"""Colocated servers on two nodes, from launch/slurm.sbatch to trained steps: two network namespaces and a stand-in srun."""

import json
import sys
from pathlib import Path

import pytest

from megatron_rl.tracking.metrics_file import read_metrics
from tests.integration import two_hosts
from tests.integration.test_colocated import RECIPE
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.skipif(bool(two_hosts.obstacle()), reason=two_hosts.obstacle()), pytest.mark.timeout(1200)]
NUM_STEPS = 2


def test_the_batch_script_serves_on_the_trainers_nodes_and_trains(tmp_path):
    make_tiny_model(tmp_path / "model", vocab_size=80)
    rows = [{"id": f"p{i}", "prompt": f"{i:02d}+17=", "answer": str(i)} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path, num_steps=NUM_STEPS))
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    script = ["launch/slurm.sbatch", "train", "--config", "recipe.yaml", "eval.every_steps=0", "data.eval_files=[]"]
    (tmp_path / "script.json").write_text(json.dumps(script))
    (tmp_path / "bin").mkdir()
    for name, text in {
        "srun": f'exec {sys.executable} -m tests.integration.slurm_hosts {tmp_path} srun "$@"',
        "scontrol": f"printf '%s\\n' {two_hosts.FIRST} {two_hosts.SECOND}",
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        "ROLLOUT_NODES": "all",
        "MEGATRON_RL_REQUIRE_GPU": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "VENV": sys.prefix,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "two",
        "SLURM_NTASKS": "",
    }
    command = [sys.executable, "-m", "tests.integration.slurm_hosts", str(tmp_path)]
    status = two_hosts.run_on_both(command, environment, tmp_path / "log", timeout_s=1100)
    log = (tmp_path / "log").read_text()
    assert status == 0, log
    assert f"servers http://{two_hosts.FIRST}:30000,http://{two_hosts.SECOND}:30000" in log
    rows = {row.step: row.metrics for row in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    assert max(rows) == NUM_STEPS and all(rows[step]["mismatch/max_abs_log_ratio"] < 1e-4 for step in range(1, NUM_STEPS + 1))
