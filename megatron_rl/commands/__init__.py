"""The commands of ``megatron-rl``, one file each: ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit status.

The command line imports only the file of the command that is called. Its imports at the top are executed before
the arguments are read, also by the launcher of the ranks; therefore ``run`` imports Megatron and SGLang itself.
"""

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
