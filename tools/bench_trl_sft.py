"""Compare CPU seconds of a supervised step, of all weights and of adapters (LoRA), with TRL's SFTTrainer on the same rows and weights.

    python tools/bench_trl_sft.py --start outputs/arithmetic --trl-python /tmp/trl/bin/python

``--start`` has the quickstart's task. The model has the given size and random weights, which both read from one folder; float32, one
process with one thread, AdamW, constant learning rate, loss on responses alone. Ours packs rows, TRL pads them. A step's seconds are the
difference between a long and a short run, divided by the steps between them, so that no start is in them.
Both sides run at the same time: CPU seconds grow with the load of shared cores and memory, for both alike. TRL's environment needs
``trl`` and ``peft`` (tools/bench_trl.py prints how to make one).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_trl import TRL, refuse_without_trl

RANK, LEARNING_RATE = 16, 1.0e-4
KINDS = ("all weights", "adapters")


def main() -> None:
    if sys.argv[1:2] == [TRL]:
        run_trl(json.loads(sys.argv[2]))
        return
    arguments = parse()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        asked = vars(arguments) | {"folder": folder, "model": str(Path(folder, "model"))}
        make_inputs(asked)
        for kind in KINDS * arguments.repeats:
            one = steps_of(asked, kind)
            one["ratio"] = one["TRL cpu_s"] / one["megatron_rl cpu_s"]
            found[kind].append(one)
            print(f"{kind}: " + "  ".join(f"{name} {number:.4g}" for name, number in one.items()), flush=True)
    for kind, repeats in found.items():
        ratios = ", ".join(f"{one['ratio']:.2f}" for one in repeats)
        print(f"{kind}: CPU seconds of TRL over megatron_rl: {ratios}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", default="outputs/arithmetic", help="folder of examples/arithmetic/warm_start.sh")
    parser.add_argument("--trl-python", default=os.environ.get("TRL_PYTHON", ""), help="TRL's Python (default: TRL_PYTHON)")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="rows per step")
    parser.add_argument("--steps", type=int, nargs=2, default=(5, 25), metavar=("SHORT", "LONG"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of megatron_rl's recipe")
    arguments = parser.parse_args()
    if not Path(arguments.start, "task", "sft.jsonl").is_file():
        parser.error(f"--start: expected task/sft.jsonl in {arguments.start}; make it with examples/arithmetic/warm_start.sh")
    refuse_without_trl(parser, arguments.trl_python)
    return arguments


def make_inputs(asked: dict[str, Any]) -> None:
    """Write rows as long as 16 problems, and a model of the asked size with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    task, model = Path(asked["start"], "task"), Path(asked["model"])
    rows = [json.loads(line) for line in (task / "sft.jsonl").read_text().splitlines()]
    rows = sorted(rows, key=lambda row: -len(row["response"]))[: asked["rows"] * asked["steps"][1]]
    Path(asked["folder"], "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    size, heads = asked["hidden_size"], asked["hidden_size"] // 32
    own = json.loads((task / "model" / "config.json").read_text())
    own |= {"hidden_size": size, "intermediate_size": 3 * size, "num_hidden_layers": asked["layers"], "head_dim": 32}
    own |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    model.mkdir()
    (model / "config.json").write_text(json.dumps(own))
    config = AutoConfig.from_pretrained(model)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(task / "model" / name, model / name)


def steps_of(asked: dict[str, Any], kind: str) -> dict[str, float]:
    """Return each side's CPU seconds per step and last loss."""
    sides = {"megatron_rl": run_ours, "TRL": run_in_trl_environment}
    with ThreadPoolExecutor() as pool:
        short, long = (list(pool.map(lambda run, steps=steps: run(asked, kind, steps), sides.values())) for steps in asked["steps"])
    found, num_steps = {}, asked["steps"][1] - asked["steps"][0]
    for name, (short_s, _), (long_s, loss) in zip(sides, short, long, strict=True):
        found |= {f"{name} cpu_s": (long_s - short_s) / num_steps, f"{name} loss": loss}
    return found


def run_ours(asked: dict[str, Any], kind: str, steps: int) -> tuple[float, float]:
    folder = Path(asked["folder"])
    (folder / "empty.yaml").write_text("{}\n")
    keys = {
        "policy.path": asked["model"],
        "policy.dtype": "float32",
        "policy.lora.rank": RANK if kind == "adapters" else 0,
        "policy.lora.alpha": RANK,
        "sft.train_files": f"[{folder / 'rows.jsonl'}]",
        "sft.output_path": folder / "ours",
        "sft.num_steps": steps,
        "sft.batch_size": asked["rows"],
        "sft.optimizer": f"{{lr: {LEARNING_RATE}, min_lr: 0.0, warmup_steps: 0, decay_style: constant, weight_decay: 0.0}}",
        "batch.max_tokens_per_microbatch": 16384,
        "run.output_dir": folder / "run",
        "run.overwrite": "true",
        "data.shuffle": "false",
    }
    words = [f"{key}={value}" for key, value in keys.items()] + asked["overrides"]
    said, cpu_s = _run([sys.executable, "-m", "megatron_rl", "sft", "--config", str(folder / "empty.yaml"), *words])
    return cpu_s, float(said.rpartition("  loss ")[2].split()[0])


def run_in_trl_environment(asked: dict[str, Any], kind: str, steps: int) -> tuple[float, float]:
    _, cpu_s = _run([asked["trl_python"], __file__, TRL, json.dumps(asked | {"kind": kind, "num_steps": steps})])
    return cpu_s, float(Path(asked["folder"], "trl.json").read_text())


def run_trl(asked: dict[str, Any]) -> None:
    """Train with TRL, and write the mean loss of the last five steps."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    settings = SFTConfig(
        output_dir=str(Path(asked["folder"], "trl")),
        max_steps=asked["num_steps"],
        per_device_train_batch_size=asked["rows"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_length=256,
        completion_only_loss=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    rows = load_dataset("json", data_files=str(Path(asked["folder"], "rows.jsonl")), split="train")
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        args=settings,
        train_dataset=rows.rename_column("response", "completion").select_columns(["prompt", "completion"]),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear") if asked["kind"] == "adapters" else None,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    Path(asked["folder"], "trl.json").write_text(str(statistics.mean(losses[-5:])))


def _run(command: Sequence[str]) -> tuple[str, float]:
    """The output of the command, and the CPU seconds of its process and of those that it waited for."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read()
    if process.returncode:
        raise SystemExit(f"bench_trl_sft: {command[0]} ended with status {process.returncode}:\n{said[-4000:]}")
    return said, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
