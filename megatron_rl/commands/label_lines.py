"""`megatron-rl label-lines`: label the code lines of responses, to train a process reward model (selection/line_labeling.py)."""

import argparse

from megatron_rl.commands import add_recipe_arguments
from megatron_rl.system.command_line.terminal import say

add_arguments = add_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.config.checks import check_config
    from megatron_rl.config.load import load_config
    from megatron_rl.run.output import check_machine, check_outputs, os_errors_with_keys
    from megatron_rl.selection.line_labeling import label_lines

    config = load_config(arguments.config, arguments.overrides)
    with os_errors_with_keys(config):
        check_config(config, command="label-lines")
        check_machine(config, "label-lines")
        check_outputs(config, "label-lines")
    label_lines(config, dry_run=arguments.dry_run, note=say)
    return 0
