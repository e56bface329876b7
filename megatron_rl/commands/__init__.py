"""The commands of ``megatron-rl``, one file each: ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit status.

The command line imports only the file of the command that is called. Its imports at the top are executed before
the arguments are read, also by the launcher of the ranks; therefore ``run`` imports Megatron and SGLang itself.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config

COMMANDS = {
    "train": "train a policy with reinforcement learning (see: megatron-rl presets)",
    "sft": "supervised warm start on reference responses",
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
    "convert": "convert a model between a Hugging Face folder and Megatron's distributed checkpoint",
    "watch": "show a run on the terminal while it trains, from its folder",
    "report": "write report.html of a run, or a page that compares several runs",
    "samples": "browse and filter the responses that a run has stored",
    "presets": "list the presets",
    "config": "explain the keys of a recipe: type, default, bound, meaning",
}
"""Maps each command to its help text, in the order of the help."""


def print_dry_run(config: "Config", command: str, world_size: int) -> None:
    """Print what ``command`` would do with this configuration."""
    # Training imports nothing of the desk: commands give the core the two functions of the desk that a run calls.
    from megatron_rl.desk.plan.dry_run import print_plan

    print_plan(config, command=command, world_size=world_size)


def write_run_report(folder: Path) -> None:
    """Write ``report.html`` into the folder of a run."""
    from megatron_rl.desk.report.run_report import write_report  # matplotlib takes a second that only the driver needs

    write_report(folder)
