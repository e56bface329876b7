"""Yarn's attention factor is applied on GPUs, although Megatron's fused rotary embedding of packs ignores it.

A dry run rejects every model that a run, convert and the Engine reject, with a one-line error that has the key.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.cli import main
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.errors import ModelError
from megatron_rl.families.rotary import inverse_frequencies
from megatron_rl.models import critic, policy
from megatron_rl.models.hf import megatron_config as translation
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import load_weights
from megatron_rl.models.megatron_fields import PLAIN, MegatronSettings
from megatron_rl.parallel import topology
from tests.integration.models_worker import pack
from tests.tiny_families import make_family_model
from tests.tiny_models import make_tokenizer

FUSED = MegatronSettings(fields={"apply_rope_fusion": True})
SEQUENCES = [torch.arange(3, 43), torch.arange(50, 60)]


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Simulate a GPU with Transformer Engine, with a fake kernel; the list has one entry per call of the kernel."""
    calls: list[int] = []

    def kernel(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int, cp_rank: int, **_: bool) -> Tensor:
        calls.append(len(t))
        group = torch.distributed.group.WORLD
        return rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_group=group)

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", kernel)
    monkeypatch.setattr(translation, "has_transformer_engine", lambda: True)
    topology.initialize(ParallelConfig(), seed=1)
    yield calls
    topology.destroy()


def logprobs(folder: Path, settings: MegatronSettings = PLAIN) -> Tensor:
    config = load_hf_config(folder)
    (chunk,) = policy.build_policy(config, ParallelConfig(), dtype=torch.float32, settings=settings, seed=None)
    load_weights([chunk], config, folder)
    batch = pack(SEQUENCES)
    with torch.no_grad():
        return policy.token_logprobs(chunk, policy.forward(chunk, batch), batch)[0]


@pytest.mark.parametrize("shape,is_fused", [("qwen2_yarn_one_group", False), ("qwen3_wide_heads_yarn", False),
                                            ("llama3_scaled", True), ("llama_linear_tied", True)])
def test_fused_rope_is_used_only_without_a_factor(
    shape: str, is_fused: bool, fused_calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family_model(tmp_path / "model", shape)
    found = logprobs(folder)
    assert bool(fused_calls) is is_fused
    monkeypatch.setattr(translation, "has_transformer_engine", lambda: False)
    torch.testing.assert_close(found, logprobs(folder), atol=1e-5, rtol=0)


def test_megatrons_fused_rope_drops_the_factor(
    fused_calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reason for disabling fusion with a factor. If this test fails, Megatron is fixed and fusion may be enabled."""
    folder = make_family_model(tmp_path / "model", "qwen2_yarn_one_group")
    right = logprobs(folder)
    monkeypatch.setattr(translation, "_check_rope_fusion", lambda *args: None)
    wrong = logprobs(folder, FUSED)
    assert fused_calls and (right - wrong).abs().max() > 0.05


@pytest.mark.parametrize("build", [policy.build_policy, critic.build_critic])
def test_rope_fusion_that_drops_the_factor_is_rejected(build: Any, fused_calls: list[int], tmp_path: Path) -> None:
    config = load_hf_config(make_family_model(tmp_path / "model", "qwen2_yarn_one_group"))
    assert inverse_frequencies(config)[1] == 0.8
    with pytest.raises(ModelError, match=r"apply_rope_fusion=true: .* attention factor of 0.8 \(yarn\)"):
        build(config, ParallelConfig(), dtype=torch.float32, settings=FUSED, seed=1)


TWO_RANKS = ["parallel.num_ranks=2", "parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"]
SHARED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.fixture
def dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Function (shape, its fields, overrides) that returns exit status and stderr."""

    def run(shape: str, *overrides: str, head: bool = False, **fields: Any) -> tuple[int, str]:
        model = make_family_model(tmp_path / "model", shape, **fields)
        if head:
            tensors = load_file(model / "model.safetensors")
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
            save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        make_tokenizer(model)
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
        (tmp_path / "recipe.yaml").write_text(
            f"preset: grpo\npolicy: {{path: {model}}}\ndata: {{train_files: [{tmp_path}/rows.jsonl]}}\n"
            "batch: {max_prompt_tokens: 16, max_response_tokens: 16}\n"
        )
        capsys.readouterr()
        status = main(["train", f"--config={tmp_path}/recipe.yaml", "--dry-run", *overrides])
        return status, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("shape", "overrides", "fields", "words"),
    [
        ("qwen2_gqa7_tied", [], dict(head=True), "lm_head.weight differs from model.embed_tokens.weight"),
        ("deepseek_v3_yarn", TWO_RANKS, dict(q_lora_rank=21), "q_lora_rank 21 does not divide"),
        ("deepseek_v3_yarn", TWO_RANKS, dict(kv_lora_rank=15), "kv_lora_rank + qk_rope_head_dim 21 does not"),
        (
            "glm4_moe_partial_rotary",
            [*TWO_RANKS, "parallel.expert_parallel_size=2", "parallel.expert_tensor_parallel_size=1"],
            dict(moe_intermediate_size=27),
            "moe_intermediate_size x n_shared_experts 27 does not divide by parallel.tensor_parallel_size 2",
        ),
    ],
)
def test_dry_run_rejects_models_that_cannot_be_loaded(
    dry_run: Any, shape: str, overrides: list[str], fields: dict[str, Any], words: str
) -> None:
    status, said = dry_run(shape, *overrides, **fields)
    assert status == 2 and "policy.path: " in said and words in said and len(said.splitlines()) == 1


def test_models_without_shared_experts_pass_the_dry_run(dry_run: Any) -> None:
    assert dry_run("glm4_moe_partial_rotary", n_shared_experts=0) == (0, "")


def test_weights_of_another_model_are_rejected_before_a_run_starts(dry_run: Any, tmp_path: Path) -> None:
    assert dry_run("llama3_scaled")[0] == 0
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 88}))
    recipe = f"--config={tmp_path}/recipe.yaml"
    assert main(["train", recipe, "--dry-run"]) == 2
    assert main(["train", recipe, "--dry-run", "policy.init=random"]) == 0
