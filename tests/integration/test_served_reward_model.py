"""A Bradley-Terry model as reward: scores of a real SGLang server equal the critic's values, for every classifier that SGLang has."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.models.hf.weights import write_score_head
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.event_loop import start_runner
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.integration.preloaded import serving
from tests.tiny_models import make_tiny_model

TOLERANCE = 1e-5
ITEMS = [(f"the answer is {n}", "", {"prompt": f"{n}+{n}="}) for n in range(8)] + [("", "", {"prompt": "p"})]


def make_reward_model(folder: Path, family: str, *, tied: bool) -> torch.Tensor:
    """A critic's folder as reward-train writes it, with a head of its own; returns the head."""
    make_tiny_model(folder, family, seed=4, tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    head = torch.randn((1, tensors["model.norm.weight"].shape[0]), generator=torch.Generator().manual_seed(7))
    save_file(tensors | {"value_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    write_score_head(folder)
    return head


def expected_scores(folder: Path, head: torch.Tensor) -> list[float]:
    """The classifier's logit at the end-of-text token, by transformers in float32."""
    declare_torchvision_ops()
    from transformers import AutoModelForSequenceClassification

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), Tokenizer(folder)
    assert torch.equal(model.score.weight, head)
    scores = []
    for response, _, fields in ITEMS:
        ids = [*tokenizer.encode_prompt(fields["prompt"], chat=False), *tokenizer.encode(response), tokenizer.eos_id]
        with torch.no_grad():
            scores.append(model(torch.tensor([ids])).logits.item())
    return scores


@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen2", True), ("llama", False)])
def test_the_score_is_the_value_after_the_end_of_the_response(tmp_path: Path, family: str, tied: bool):
    head = make_reward_model(tmp_path / "model", family, tied=tied)
    expected = expected_scores(tmp_path / "model", head)
    assert len({round(value, 3) for value in expected}) > 3
    options = {"tokenizer_path": str(tmp_path / "model")}
    server = SglangServer(ServerOptions(str(tmp_path / "model"), tokenizer=True), tmp_path / "sglang.log", start_timeout_s=400.0)
    with serving(server):
        for limit in (500.0, abs(expected[0])):
            limits = {"low": -limit, "high": limit, "url": server.url}
            with start_runner("reward_model", RunnerSettings(timeout_s=60.0), options=options | limits, row_fields=("prompt",)) as runner:
                scores = runner.submit(ITEMS).result()
            limited = [min(max(value, -limit), limit) for value in expected]
            assert [s.value for s in scores] == pytest.approx(limited, abs=TOLERANCE * max(map(abs, expected)))
    if family == "qwen2":
        architectures = json.loads((tmp_path / "model" / "config.json").read_text())["architectures"]
        assert architectures == ["Qwen2ForSequenceClassification"]
