"""The quickstart with a tiny model of another family: task, warm start from random weights, critic, T-PPO on a CPU.

    python tools/learn_families.py --work /tmp/learn gpt_oss qwen3_next [key=value ...]

Prints the accuracy on held-out prompts before and after. Families with linear attention need Python 3.12. key=value arguments
override the recipe of the last command (``run.seed=2``).
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
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
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
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": _ROPE,
        "swiglu_limit": 7.0,
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


def learn(family: str, folder: Path, overrides: list[str]) -> str:
    """Train, and return the accuracies."""
    task, recipe = folder / "task", ["--config", "examples/arithmetic/tppo.yaml"]
    data = [f"data.train_files=[{task}/train.jsonl]", f"data.eval_files=[{task}/eval.jsonl]"]
    if not task.exists():
        run(folder, "examples/arithmetic/make_task.py", "--output", str(task))
        fields = model_config(_vocabulary_size(task)) | FIELDS[family]
        del fields["rope_theta"], fields["use_sliding_window"]
        write_json(task / "model" / "config.json", fields | {"model_type": family})
    if not (folder / "critic" / "config.json").exists():
        start = [*data, f"policy.path={task}/model", "policy.init=random", f"sft.train_files=[{task}/sft.jsonl]"]
        run(folder, "-m", "megatron_rl", "sft", *recipe, *start, f"sft.output_path={folder}/sft")
        critic = [f"policy.path={folder}/sft", "critic.path=", f"critic_pretrain.output_path={folder}/critic"]
        run(folder, "-m", "megatron_rl", "critic-pretrain", *recipe, *data, *critic, f"run.output_dir={folder}", "run.overwrite=true")
    models = [f"policy.path={folder}/sft", f"critic.path={folder}/critic"]
    out = [f"run.output_dir={folder}/tppo", "run.overwrite=true"]
    text = run(folder, "-m", "megatron_rl", "train", *recipe, *data, *models, *out, *overrides)
    return _ACCURACY.findall(text)[-1]


def _vocabulary_size(task: Path) -> int:
    return int(json.loads((task / "model" / "config.json").read_text())["vocab_size"])


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
