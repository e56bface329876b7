"""Runs with adapters alone on the servers (``policy.lora.sync: adapters``) on the real stack: a whole one, and one that was resumed."""

import json
import random

import pytest
from safetensors.torch import load_file

from megatron_rl.tracking.metrics_file import read_metrics
from tests.integration.test_train import run
from tests.word_models import make_word_model

NUM_STEPS = 3
RECIPE = """
preset: grpo
run: {{num_steps: {num_steps}, seed: 5}}
policy:
  path: {folder}/model
  lora: {{rank: 4, alpha: 16, sync: adapters}}
  optimizer: {{lr: 1.0e-2, warmup_steps: 0}}
batch:
  num_prompts_per_step: 4
  num_samples_per_prompt: 4
  max_prompt_tokens: 64
  max_response_tokens: 20
  policy_minibatch_size: 8
  max_tokens_per_microbatch: 512
data: {{train_files: ["{folder}/train.jsonl"], use_chat_template: false, system_prompt: "", reward_fields: []}}
reward: {{name: "tests.integration.preset_reward:even_length", num_workers: 1}}
rollout: {{num_servers: 1, parity_every_steps: 1, max_logprob_difference: 1.0e-3}}
tracking: {{mlflow: false}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder with the runs."""
    folder = tmp_path_factory.mktemp("lora")
    make_word_model(folder / "model", "qwen3", max_position_embeddings=1024)
    rng = random.Random(0)
    rows = [{"id": i, "prompt": f"{rng.randint(0, 9)}+{rng.randint(0, 9)}=", "answer": "1"} for i in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, num_steps=NUM_STEPS))
    runs = (["whole"], ["resumed", "run.num_steps=2"], ["resumed", "run.resume=true"])
    for overrides in ([f"run.output_dir={folder}/{name}", *own] for name, *own in runs):
        status, output = run(folder, "train", *overrides)
        assert status == 0, f"{overrides}\n{output[-6000:]}"
    return folder


def rows_of(folder, name="whole"):
    return {row.step: row.metrics for row in read_metrics(folder / name / "metrics.jsonl")}


def test_servers_compute_the_trainers_log_probs_after_every_publish(folder):
    rows = rows_of(folder)
    assert sorted(rows) == list(range(1, NUM_STEPS + 1))
    assert all(row["policy/grad_norm"] > 0 for row in rows.values())
    assert all(row["mismatch/parity_max"] < 1e-4 for row in rows.values())
    # The reference is the model without adapters, which the policy has left: a server without them would fail the line above.
    assert rows[NUM_STEPS]["kl/reference_per_token"] > 1e-3


def test_a_resumed_run_with_adapters_on_the_servers_equals_the_whole_run(folder):
    whole, resumed = (rows_of(folder, name)[NUM_STEPS] for name in ("whole", "resumed"))
    names = ("policy/grad_norm", "kl/reference_per_token", "mismatch/kl", "reward/mean")
    assert {name: resumed[name] for name in names} == {name: whole[name] for name in names}


def test_a_publish_sends_the_adapters_bytes_alone(folder):
    policy = folder / "whole" / "policy"
    adapter_bytes = sum(tensor.nbytes for tensor in load_file(policy / "adapter" / "adapter_model.safetensors").values())
    assert [row["sync/bytes"] for row in rows_of(folder).values()] == [adapter_bytes] * NUM_STEPS
    assert adapter_bytes < (policy / "model.safetensors").stat().st_size / 4
