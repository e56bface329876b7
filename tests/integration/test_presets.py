"""Every preset for a few steps on the real stack: one tiny model, one SGLang server that all runs attach to, and one of a teacher."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.config.load import preset_names
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.samples_file import read_samples
from tests.integration.preloaded import preloading, serving
from tests.tiny_families import load_with_transformers
from tests.word_models import make_word_model

RECIPE = """
run: {{num_steps: 3, seed: 5}}
policy: {{path: {folder}/model, dtype: float32, optimizer: {{lr: 1.0e-3, warmup_steps: 0}}}}
critic: {{warmup_steps: 0, optimizer: {{lr: 1.0e-3, warmup_steps: 0}}}}
parallel: {{collective_timeout_s: 120}}
batch:
  num_prompts_per_step: 4
  num_samples_per_prompt: 4
  max_prompt_tokens: 64
  max_response_tokens: 20
  window_tokens: 0
  policy_minibatch_size: 8
  critic_minibatch_size: 8
  max_tokens_per_microbatch: 512
data: {{train_files: ["{folder}/train.jsonl"], use_chat_template: false, system_prompt: "", reward_fields: []}}
reward: {{name: "tests.integration.preset_reward:even_length", num_workers: 1}}
rollout: {{urls: ["{url}"]}}
tracking: {{mlflow: false}}
"""
JUDGE = "{{url: '{url}', tokenizer_path: '{folder}/model'}}"
WITH_CRITIC = ("ppo", "tppo", "partial_rollout_ppo", "vc_ppo", "vapo", "sao", "pag", "pairwise_ppo", "seed_vl_hybrid")
"""Their first step is the critic's alone: a random value head does not steer the policy."""
WHOLE_RESPONSES = ("partial_rollout_ppo",)
"""Their policy takes no step where no response finishes, which depends on the sampled lengths."""
OVERRIDES = {
    "tppo": ["batch.window_tokens=8", "algorithm.ignore_boundary_tokens=2"],
    "partial_rollout_ppo": ["batch.window_tokens=8"],
    "dapo": ["algorithm.overlong_buffer_tokens=8"],
    "distillation": [
        "batch.window_tokens=8",
        "reward.name=none",
        "reference.path={folder}/teacher",
        "reference.path_by_type={{general: {folder}/large, verifiable: '{teacher}'}}",
    ],
    "reinforce_pp": ["batch.num_samples_per_prompt=1", "batch.num_prompts_per_step=16"],
    "pag": ["batch.max_response_tokens=400", "environment.max_turn_tokens=12"],
    "pairwise_ppo": ["reward.name=pairwise", f"reward.options={JUDGE}"],
    "seed_vl_hybrid": [
        "reward.require_think=false",
        "reward.by_type.verifiable.name=tests.integration.preset_reward:even_length",
        f"reward.by_type.general.options={JUDGE}",
    ],
}
VOCABULARY = 256
TOP_K = (VOCABULARY, 4)
DISTILLS = "preset=distillation schedule.mode=sync run.num_steps=2 run.keep_policy_every_s=0.001 batch.policy_minibatch_size=16 "
DISTILLS += "reward.name=none algorithm.kl.place=loss algorithm.kl.estimator=k2 reference.path={teacher} algorithm.kl.top_k="
EXPECTED = {
    "distillation": ("kl/reference_per_token", "rollout/num_carried"),
    "dapo": ("dynamic_sampling/num_rounds", "dynamic_sampling/useful_share"),
    "grpo": ("kl/reference_per_token", "policy/kl_loss"),
    "reinforce_pp": ("kl/reference_per_token",),
    "rloo": ("kl/reference_per_response",),
    "remax": ("reward/greedy_mean",),
    "sapo": ("policy/gate_slope",),
    "sao": ("policy/ess", "policy/clip_fraction_low", "passes/updated_values"),
    "vapo": ("critic/explained_variance", "critic/advantage_q1"),
    "pag": ("dialogue/first_accuracy", "dialogue/final_accuracy"),
    "pairwise_ppo": ("reward/swap_consistency",),
    "seed_vl_hybrid": ("policy/kl_loss", "reward/swap_consistency"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(output folder, what was printed) after one process has run every preset."""
    folder = tmp_path_factory.mktemp("presets")
    make_word_model(folder / "model", max_position_embeddings=1024)
    make_word_model(folder / "teacher", max_position_embeddings=1024)
    make_word_model(folder / "large", max_position_embeddings=1024, num_hidden_layers=3)
    rng = random.Random(0)
    rows = []
    for i in range(24):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        kind = ("verifiable", "general")[i % 2]
        rows.append({"id": i, "prompt": f"{a}+{b}=", "answer": str(a + b), "type": kind})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ServerOptions(model_path=str(folder / "model"), deterministic=True, tokenizer=True)
    served = SglangServer(options, folder / "server.log"), SglangServer(ServerOptions(str(folder / "large")), folder / "teacher.log")
    with serving(served[0]) as server, serving(served[1]) as teacher, preloading():
        (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, url=server.url))
        wanted = {
            name: [f"preset={name}", *OVERRIDES.get(name, []), *["critic.warmup_steps=1"] * (name in WITH_CRITIC)]
            for name in preset_names()
        }
        wanted |= {f"top {k}": f"{DISTILLS}{k}".split() for k in TOP_K}
        names = {"folder": folder, "url": server.url, "teacher": teacher.url}
        wanted = {name: [text.format(**names) for text in texts] for name, texts in wanted.items()}
        arguments = [str(folder / "recipe.yaml"), str(folder / "out"), json.dumps(wanted)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.presets_worker", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return folder / "out", done.stdout


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_trains_the_policy(runs, preset):
    folder, output = runs
    own = output.partition(f"== {preset} begins\n")[2].partition("== ")[0]
    assert f"== {preset} ended with 0" in output, own
    rows = {row.step: row.metrics for row in read_metrics(folder / preset / "metrics.jsonl")}
    assert sorted(rows) == [1, 2, 3]
    policy_steps = [step for step in rows if step > (preset in WITH_CRITIC)]
    if preset in WHOLE_RESPONSES:
        policy_steps = [step for step in policy_steps if rows[step]["rollout/num_finished"]]
    assert policy_steps and all(rows[step]["policy/grad_norm"] > 0 for step in policy_steps)
    for name in EXPECTED.get(preset, ()):
        assert any(name in metrics for metrics in rows.values()), f"{name} is not among {sorted(rows[3])}"
    has_critic = any("critic/loss" in metrics for metrics in rows.values())
    assert has_critic == (preset in WITH_CRITIC)


@pytest.mark.parametrize("k", TOP_K)
def test_loss_and_gradient_of_distillation_are_those_of_the_served_teachers_whole_distribution(runs, k):
    """With the whole vocabulary the divergence is exact; otherwise the other tokens are one event."""
    folder, run = runs[0].parent, runs[0] / f"top {k}"
    assert f"== top {k} ended with 0" in runs[1], runs[1].partition(f"== top {k} begins")[2]
    metrics = {row.step: row.metrics for row in read_metrics(run / "metrics.jsonl")}
    teacher = load_with_transformers(folder / "large").double()
    for step, start in ((1, folder / "model"), (2, run / "policies" / "step-1")):
        student, divergences = load_with_transformers(start).double(), []
        student.get_input_embeddings().padding_idx = None  # here the padding token is sampled like any other
        for row in read_samples([run / "samples" / f"step_{step:06d}.parquet"]).to_pylist():
            tokens, first = torch.tensor(row["prompt_ids"] + row["token_ids"]), len(row["prompt_ids"])
            own, others = (model(tokens[None]).logits[0, first - 1 : -1].log_softmax(-1) for model in (student, teacher))
            divergences.append(divergence(own, others.detach(), k)[torch.tensor(row["mask"])])
        loss = torch.cat(divergences).mean()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in student.parameters() if p.grad is not None]).norm()
        found = metrics[step]["policy/kl_loss"], metrics[step]["policy/grad_norm"]
        np.testing.assert_allclose(found, (loss.item(), norm.item()), rtol=1e-4)


def divergence(own: Tensor, others: Tensor, k: int) -> Tensor:
    """[T] KL of two distributions [T, vocabulary] in which the tokens after the k most likely of ``others`` are one event."""
    order = others.argsort(-1, descending=True)
    p, q = (values.gather(-1, order).exp() for values in (own, others))
    if k < VOCABULARY:
        p, q = (torch.cat([values[:, :k], values[:, k:].sum(-1, keepdim=True)], -1) for values in (p, q))
    return (p * (p / q).log()).sum(-1)
