"""The commands of ``megatron-rl``, one file each: ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit status.

The command line imports only the file of the command that is called. Its imports at the top are executed before
the arguments are read, also for ``--help``, by completion and by the launcher of the ranks; therefore ``run`` imports
libraries and all that needs them itself.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.system.command_line.terminal import positive_int

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config

COMMANDS = {
    "train": "train a policy with reinforcement learning (see: megatron-rl presets)",
    "sft": "supervised training on reference responses or on the assistant's turns of conversations",
    "dpo": "train a policy on preferences, relative to the policy that it starts from",
    "critic-pretrain": "regress the critic onto returns of the frozen policy",
    "reward-train": "train a reward model on preferences or line labels",
    "evaluate": "measure policies on held-out prompts, in sequence on servers that start once",
    "serve": "start SGLang servers in the foreground, for a run that attaches to them",
    "score": "score the responses of a JSONL file",
    "select-prompts": "select the prompts that are worth training on",
    "label-lines": "label program lines by whether the prefix can still be completed correctly",
    "plan": "rank parallel layouts for N GPUs by predicted seconds per finished response",
    "simulate": "predict the times of a run from a recipe and a finished run's measurements",
    "doctor": "check the machine, trainer-server agreement and layouts; diagnose a hung or diverging run",
    "check": "replay recorded steps of a released recipe and report the first deviation of this installation",
    "convert": "convert a model between a Hugging Face folder and Megatron's distributed checkpoint, or push it to the Hub",
    "watch": "show a run on the terminal while it trains, from its folder",
    "report": "write report.html of a run, or a page that compares several runs",
    "samples": "browse and filter the responses that a run has stored",
    "presets": "list the presets",
    "config": "explain the keys of a recipe: type, default, bound, meaning",
    "examples": "write the examples, recipes and launch scripts of this version into a folder",
}
"""Maps each command to its help text, in the order of the help."""

EXAMPLES = {
    "train": "megatron-rl train --config recipe.yaml parallel.num_ranks=8 --dry-run",
    "sft": "megatron-rl sft --config recipe.yaml sft.train_files=[solutions.jsonl]",
    "dpo": "megatron-rl dpo --config recipe.yaml dpo.train_files=[preferences.jsonl]",
    "critic-pretrain": "megatron-rl critic-pretrain --config recipe.yaml critic_pretrain.output_path=outputs/critic",
    "reward-train": "megatron-rl reward-train --config recipe.yaml reward_train.train_files=[preferences.jsonl]",
    "evaluate": "megatron-rl evaluate --config recipe.yaml --policies outputs/run/policies/* eval.num_samples=4",
    "serve": "megatron-rl serve --config recipe.yaml --trainer node0 --api-key-env SGLANG_KEY",
    "score": "megatron-rl score --reward math --input responses.jsonl --output scored.jsonl",
    "select-prompts": "megatron-rl select-prompts --config recipe.yaml --dry-run",
    "label-lines": "megatron-rl label-lines --config recipe.yaml --dry-run",
    "plan": "megatron-rl plan --model models/Qwen3-30B-A3B --gpus 64 --write recipe.yaml",
    "simulate": "megatron-rl simulate --run outputs/run --windows 1024 4096",
    "doctor": "megatron-rl doctor --config recipe.yaml",
    "check": "megatron-rl check --trainer-only",
    "convert": "megatron-rl convert --input models/Qwen2.5-7B --output models/Qwen2.5-7B-megatron --to megatron",
    "watch": "megatron-rl watch outputs/run",
    "report": "megatron-rl report outputs/run outputs/other",
    "samples": "megatron-rl samples outputs/run --where 'reward < 0.5' --sort length:desc",
    "presets": "megatron-rl presets",
    "config": "megatron-rl config batch.window_tokens",
    "examples": "megatron-rl examples megatron_rl-examples",
}
"""Maps each command to the example at the end of its help."""

WITHOUT_TORCH = ("plan", "simulate", "config")
"""Commands that read names and sizes from files that import torch, and run where it is not installed."""


def print_dry_run(config: "Config", command: str, world_size: int, inputs: Sequence[str] = ()) -> None:
    """Print what ``command`` would do with this configuration; only the resolved configuration if ``megatron_rl.desk`` is not installed."""
    # Training imports nothing of the desk: commands give the core the two functions of the desk that a run calls.
    try:
        from megatron_rl.desk.plan.dry_run import print_plan
    except ModuleNotFoundError as error:
        if "megatron_rl.desk" not in str(error):
            raise
        from megatron_rl.config.load import config_to_yaml
        from megatron_rl.system.command_line.terminal import show

        show(config_to_yaml(config), *inputs)
        print(
            f"dry run: the configuration is good for `megatron-rl {command}`; nothing was started. Batch arithmetic, stages and "
            f"memory are left out, because this installation lacks megatron_rl/desk ({error}): install the whole package"
        )
        return
    print_plan(config, command=command, world_size=world_size, inputs=inputs)


def write_run_report(folder: Path) -> None:
    """Write ``report.html`` into the folder of a run."""
    from megatron_rl.desk.report.run_report import write_report  # matplotlib takes a second that only the driver needs

    write_report(folder)


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, action="append", help="YAML recipe; may be repeated, later files override earlier ones")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit without starting anything")
    parser.add_argument(
        "--all-rows", action="store_true", help="tokenize every row of the data before the start (default: the first and last 1,000)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")


def add_rank_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Same as ``add_recipe_arguments``, for commands that run on ranks."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--gpus-per-node", type=positive_int, metavar="N", help="with --dry-run: GPUs per node of the planned run (default: of this node)"
    )
