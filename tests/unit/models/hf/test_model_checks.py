"""A dry run rejects every model that a run, convert and the Engine reject, with a one-line error that has the key."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatron_rl.cli import main
from tests.tiny_families import make_family_model

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
        ("deepseek_v3_yarn", TWO_RANKS, dict(q_lora_rank=21, **SHARED), "q_lora_rank 21 does not divide"),
        ("deepseek_v3_yarn", TWO_RANKS, dict(kv_lora_rank=15, **SHARED), "kv_lora_rank + qk_rope_head_dim 21 does not"),
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
