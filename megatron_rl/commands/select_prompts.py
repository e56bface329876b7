"""`megatron-rl select-prompts`: keeps the prompts that are worth training on (selection/prompt_selection.py)."""

import argparse

from rich.console import Console

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.run.launch import add_recipe_arguments
from megatron_rl.selection.prompt_selection import check_inputs, check_selection, plan_table, select_prompts
from megatron_rl.system.command_line.terminal import say

add_arguments = add_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    check_config(config, command="select-prompts")
    check_selection(config)
    candidates = check_inputs(config)
    if arguments.dry_run:
        Console().print(plan_table(config, candidates))
        return 0
    for table in select_prompts(config, candidates, note=say).tables():
        Console().print(table)
    say(f"kept prompts: {config.select_prompts.output_path}")
    return 0
