"""Recipes and model configurations that the tests of several rooms start from."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError

DENSE = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 32,
    "max_position_embeddings": 256,
}
MODEL = {**DENSE, "model_type": "qwen2"}
SPARSE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
BIASED = {**SPARSE, "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 1, "topk_method": "noaux_tc"}


def write_recipe(folder: Path, model: dict) -> Path:
    """A recipe that passes every check, with ``model`` as config.json of its policy; all files are in ``folder``."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "model" / "model.safetensors").write_bytes(b"")
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = folder / "recipe.yaml"
    file.write_text(
        f"""
preset: tppo
policy: {{path: {folder}/model}}
data: {{train_files: [{folder}/train.jsonl]}}
batch: {{max_prompt_tokens: 64, max_response_tokens: 96, window_tokens: 32}}
"""
    )
    return file


def load(folder: Path, model: dict, *overrides: str):
    """The configuration of ``write_recipe`` with overrides of policy.moe or algorithm."""
    keys = [text if text.startswith("algorithm") else f"policy.moe.{text}" for text in overrides]
    return load_config(write_recipe(folder, model), keys)


def problems(recipe, *overrides, command="train", world_size=None):
    """The message with which ``recipe`` with these overrides is rejected."""
    with pytest.raises(ConfigError) as error:
        check_config(load_config(recipe, overrides), command=command, world_size=world_size)
    return str(error.value)
