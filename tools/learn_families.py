"""The quickstart with a tiny model of another family: task, warm start from random weights, critic, T-PPO on a CPU.

    python tools/learn_families.py --work /tmp/learn gpt_oss kimi_k2 [key=value ...]

Prints the accuracy on held-out prompts before and after 30 steps. Families with linear attention need Python 3.12. key=value
arguments override the recipe of T-PPO (``run.seed=2``).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from tiny_model import model_config, write_json  # noqa: E402  (examples are no package)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Two value heads per key head. SGLang reads the interval, and the share of a head that rotates from beside rope_parameters.
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
}
FIELDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": _ROPE,
        "swiglu_limit": 7.0,
    },
    "kimi_k2": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0},
        # The yarn that changes no number: on a CPU SGLang has no other rotation for this family.
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 256},
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        **_LINEAR,
        **_EXPERTS,
        **{"shared_expert_intermediate_size": 48, "mlp_only_layers": [], "norm_topk_prob": True},
    },
    "qwen3_5_text": {"architectures": ["Qwen3_5ForCausalLM"], **_LINEAR},
    "qwen3_5_moe_text": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **_LINEAR,
        **_EXPERTS,
        "shared_expert_intermediate_size": 48,
    },
}
"""Fields of config.json besides those of the examples' Qwen3."""
_ACCURACY = re.compile(r"accuracy on held-out prompts\s+(.*)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs; a family's files in it are used again")
    parser.add_argument("arguments", nargs="+", metavar="family or key=value")
    parsed = parser.parse_args()
    overrides = [argument for argument in parsed.arguments if "=" in argument]
    for family in [argument for argument in parsed.arguments if argument not in overrides]:
        started = time.monotonic()
        found = learn(family, parsed.work.resolve() / family, overrides)
        print(family, *overrides, found, f"({time.monotonic() - started:.0f} s)", flush=True)
    return 0


def model_fields(family: str, vocab_size: int) -> dict[str, Any]:
    """config.json of the family's tiny model."""
    fields = model_config(vocab_size) | FIELDS[family] | {"model_type": family}
    foreign = {"rope_theta", "use_sliding_window"} | ({"head_dim"} if "kv_lora_rank" in fields else set())
    return {name: value for name, value in fields.items() if name not in foreign}


def learn(family: str, folder: Path, overrides: list[str]) -> str:
    """Train, and return the accuracies."""
    task, recipe = folder / "task", ["--config", "examples/arithmetic/tppo.yaml"]
    data = [f"data.train_files=[{task}/train.jsonl]", f"data.eval_files=[{task}/eval.jsonl]"]
    if not task.exists():
        run(folder, "examples/arithmetic/make_task.py", "--output", str(task))
        file = task / "model" / "config.json"
        write_json(file, model_fields(family, json.loads(file.read_text())["vocab_size"]))
    if not (folder / "critic" / "config.json").exists():
        start = [*data, f"policy.path={task}/model", "policy.init=random", f"sft.train_files=[{task}/sft.jsonl]"]
        run(folder, "-m", "megatron_rl", "sft", *recipe, *start, f"sft.output_path={folder}/sft")
        critic = [f"policy.path={folder}/sft", "critic.path=", f"critic_pretrain.output_path={folder}/critic"]
        run(folder, "-m", "megatron_rl", "critic-pretrain", *recipe, *data, *critic, f"run.output_dir={folder}", "run.overwrite=true")
    models = [f"policy.path={folder}/sft", f"critic.path={folder}/critic"]
    out = [f"run.output_dir={folder}/tppo", "run.overwrite=true"]
    text = run(folder, "-m", "megatron_rl", "train", *recipe, *data, *models, *out, "run.num_steps=30", *overrides)
    return _ACCURACY.findall(text)[-1]


def run(folder: Path, *words: str) -> str:
    """Run a Python command in the repository; its output, also in ``folder/log.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MEGATRON_RL_REQUIRE_GPU": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with (folder / "log.txt").open("a") as log:
        log.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:3])} failed:\n{done.stdout[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
