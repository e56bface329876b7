"""`megatron-rl label-lines`: labels for a process reward model (selection/line_labeling.py)."""

import argparse

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.run.launch import add_recipe_arguments
from megatron_rl.selection.line_labeling import label_lines
from megatron_rl.system.command_line.terminal import say

add_arguments = add_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    check_config(config, command="label-lines")
    label_lines(config, dry_run=arguments.dry_run, note=say)
    return 0
