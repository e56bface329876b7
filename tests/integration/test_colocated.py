"""A whole run with its server on the trainer's devices and models in host memory: turns, equal log-probs, a server that dies."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.timeline import read_timeline
from tests.integration.preloaded import preloading
from tests.tiny_models import make_tiny_model

TIMEOUT_S = 400
NUM_STEPS = 4
RECIPE = """
preset: tppo
run: {{num_steps: {num_steps}, seed: 3, output_dir: {folder}/run}}
policy: {{path: {folder}/model, init: random, offload: always, optimizer: {{lr: 1.0e-3}}}}
critic: {{warmup_steps: 1, offload: always, optimizer: {{lr: 1.0e-3}}}}
parallel: {{collective_timeout_s: 120}}
batch:
  num_prompts_per_step: 8
  num_samples_per_prompt: 2
  max_prompt_tokens: 32
  max_response_tokens: 24
  window_tokens: 10
  window_jitter_tokens: 0
  policy_minibatch_size: 8
  critic_minibatch_size: 8
  max_tokens_per_microbatch: 256
algorithm: {{ignore_boundary_tokens: 2}}
data: {{train_files: ["{folder}/train.jsonl"], eval_files: ["{folder}/train.jsonl"]}}
reward: {{name: math, num_workers: 1}}
rollout: {{placement: colocated, bucket_bytes: 40000}}
eval: {{every_steps: 2, num_prompts: 4}}
tracking: {{mlflow: false}}
"""

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(output folder, what it printed)."""
    folder = tmp_path_factory.mktemp("colocated")
    make_tiny_model(folder / "model", vocab_size=80)
    rng = random.Random(0)
    rows = [{"id": f"p{i}", "prompt": f"{rng.randint(0, 99):02d}+17=", "answer": str(i)} for i in range(20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, num_steps=NUM_STEPS))
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with preloading():
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.colocated_worker", "--config", str(folder / "recipe.yaml")],
            env={**inherited, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", done.stdout + done.stderr


def test_a_server_killed_while_asleep_is_restarted_for_the_next_weights(finished_run):
    folder, output = finished_run
    rows = {row.step: row.metrics for row in read_metrics(folder / "metrics.jsonl")}
    assert sorted(rows) == list(range(NUM_STEPS + 1))
    assert rows[1]["rollout/num_server_restarts"] == rows[NUM_STEPS]["rollout/num_server_restarts"] == 1
    assert "killed asleep" in output and "again" in output
    for step in range(1, NUM_STEPS):
        assert rows[step + 1]["rollout/num_carried"] == 16 - rows[step]["rollout/num_finished"]


def test_sampled_tokens_have_the_trainers_logprobs_in_every_step(finished_run):
    for row in read_metrics(finished_run[0] / "metrics.jsonl"):
        if row.step:
            assert row.metrics["mismatch/max_abs_log_ratio"] < 1e-4
            assert ("policy/grad_norm" in row.metrics) == (row.step > 1)


def test_server_and_trainer_take_turns(finished_run):
    spans = read_timeline(finished_run[0] / "timeline.json")
    on_devices = sorted((span.start_s, span.end_s, span.name) for span in spans if span.lane != "host")
    assert {name for _, _, name in on_devices} >= {"generate", "sleep", "update_policy", "update_critic", "publish"}
    for one, two in itertools.pairwise(on_devices):
        assert one[1] <= two[0], f"{one[2]} overlaps {two[2]}"
