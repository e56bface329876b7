"""Distillation by the divergence over a teacher's most likely tokens: whole runs against a real SGLang server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.tracking.metrics_file import read_metrics
from tests.integration.preloaded import preloading, serving
from tests.integration.test_presets import RECIPE
from tests.tiny_families import load_with_transformers
from tests.word_models import make_word_model

VOCABULARY = 256
TOP_K = (VOCABULARY, 4)
NUM_STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The runs' folder, after one process has distilled a teacher of another size with each k."""
    folder = tmp_path_factory.mktemp("distillation")
    make_word_model(folder / "model", max_position_embeddings=1024)
    make_word_model(folder / "teacher", max_position_embeddings=1024, num_hidden_layers=3)
    (folder / "train.jsonl").write_text("".join(json.dumps({"id": i, "prompt": f"{i}+{i + 1}="}) + "\n" for i in range(9)))
    student = SglangServer(ServerOptions(str(folder / "model"), deterministic=True), folder / "student.log")
    teacher = SglangServer(ServerOptions(str(folder / "teacher")), folder / "teacher.log")
    settings = ["preset=distillation", f"run.num_steps={NUM_STEPS}", "run.keep_policy_every_s=0.001", "schedule.mode=sync"]
    settings += ["batch.policy_minibatch_size=16", "reward.name=none", "data.answer_required=false"]
    settings += ["algorithm.kl.place=loss", "algorithm.kl.estimator=k2"]
    with serving(student), serving(teacher), preloading():
        (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, url=student.url))
        runs = {f"k{k}": [*settings, f"algorithm.kl.top_k={k}", f"reference.path={teacher.url}"] for k in TOP_K}
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.presets_worker", str(folder / "recipe.yaml"), str(folder), json.dumps(runs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert all(f"== {name} ended with 0" in done.stdout for name in runs), done.stdout
    yield folder


@pytest.mark.parametrize("k", TOP_K)
def test_loss_and_gradient_of_each_step_are_those_of_the_teachers_whole_distribution(folder: Path, k: int) -> None:
    """With the whole vocabulary the divergence is exact; otherwise the other tokens are one event."""
    run = folder / f"k{k}"
    metrics = {row.step: row.metrics for row in read_metrics(run / "metrics.jsonl")}
    teacher = load_with_transformers(folder / "teacher").double()
    for step, start in ((1, folder / "model"), (2, run / "policies" / "step-1")):
        student = load_with_transformers(start).double()
        divergences = []
        for row in pyarrow.parquet.read_table(run / "samples" / f"step_{step:06d}.parquet").to_pylist():
            tokens, first = torch.tensor(row["prompt_ids"] + row["token_ids"]), len(row["prompt_ids"])
            own, others = (model(tokens[None]).logits[0, first - 1 : -1].log_softmax(-1) for model in (student, teacher))
            divergences.append(divergence(own, others.detach(), k)[torch.tensor(row["mask"])])
        loss = torch.cat(divergences).mean()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in student.parameters() if p.grad is not None]).norm()
        found = metrics[step]["policy/kl_loss"], metrics[step]["policy/grad_norm"]
        np.testing.assert_allclose(found, (loss.item(), norm.item()), rtol=1e-4)
        assert metrics[step]["policy/loss"] == pytest.approx(loss.item(), rel=1e-4)


def divergence(own: Tensor, others: Tensor, k: int) -> Tensor:
    """[T] KL of two distributions [T, vocabulary] in which the tokens after the k most likely of ``others`` are one event."""
    order = others.argsort(-1, descending=True)
    p, q = (values.gather(-1, order).exp() for values in (own, others))
    if k < VOCABULARY:
        p, q = (torch.cat([values[:, :k], values[:, k:].sum(-1, keepdim=True)], -1) for values in (p, q))
    return (p * (p / q).log()).sum(-1)
