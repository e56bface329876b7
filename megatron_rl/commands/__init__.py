"""The commands of ``megatron-rl``, one file each: ``add_arguments(parser)`` and ``run(arguments)``, the exit status.

The command line imports the file of the command that is called and no other. What a file imports at its top is paid
before the arguments are read, by the launcher of the ranks too: Megatron and SGLang are imported inside ``run``.
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
    "evaluate": "measure policies on held-out prompts, one after the other on servers that start once",
    "serve": "start SGLang servers in the foreground, for a run that attaches to them",
    "score": "grade the responses of a JSONL file",
    "select-prompts": "keep the prompts that are worth training on",
    "label-lines": "label the lines of programs that can still be completed to a right one",
    "plan": "find layouts that fit so many GPUs, ranked by the seconds of a finished response",
    "simulate": "predict what a run takes, from a recipe and what a finished run measured",
    "doctor": "look whether this machine is fit for a run, whether engines and layouts compute the same, and why a run hangs or disagrees",
    "check": "replay recorded steps of a released recipe, and say where this installation departs from them",
    "convert": "convert a model between a Hugging Face folder and Megatron's distributed checkpoint",
    "watch": "show a run on the terminal while it trains, from its folder",
    "report": "write report.html of a run, or of several runs a page that compares them",
    "samples": "browse and filter the responses that a run has stored",
    "presets": "list the presets",
    "config": "explain every key of a recipe: type, default, bound, meaning",
}
"""Name -> what it does, in the order of the help."""


def print_dry_run(config: "Config", command: str, world_size: int) -> None:
    """Print what ``command`` would do with this configuration."""
    # Training imports nothing of the desk: commands give the core the two functions of the desk that a run calls.
    from megatron_rl.desk.plan.dry_run import print_plan

    print_plan(config, command=command, world_size=world_size)


def write_run_report(folder: Path) -> None:
    """Write ``report.html`` into the folder of a run."""
    from megatron_rl.desk.report.run_report import write_report  # matplotlib takes a second that only the driver needs

    write_report(folder)
