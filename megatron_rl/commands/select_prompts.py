"""`megatron-rl select-prompts`: keeps the prompts that are worth training on (selection/prompt_selection.py)."""

import argparse
from typing import TYPE_CHECKING

from megatron_rl.commands import add_recipe_arguments
from megatron_rl.system.command_line.terminal import say, show

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config

add_arguments = add_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_rl.config.checks import check_config
    from megatron_rl.config.load import load_config
    from megatron_rl.run.output import check_machine, check_outputs, os_errors_with_keys
    from megatron_rl.selection.prompt_selection import check_inputs, check_selection, plan_table, select_prompts

    config = load_config(arguments.config, arguments.overrides)
    with os_errors_with_keys(config):
        check_config(config, command="select-prompts")
        check_selection(config)
        if not config.select_prompts.scores_path:
            check_machine(config, "select-prompts")
        check_outputs(config, "select-prompts")
        types, num_duplicates = check_inputs(config)
        notes = [] if config.select_prompts.scores_path else _preview(config, all_rows=arguments.all_rows)
    if arguments.dry_run:
        Console().print(plan_table(config, types, num_duplicates))
        show(*notes, "dry run: the configuration is good for `megatron-rl select-prompts`; nothing was started")
        return 0
    for table in select_prompts(config, types, num_duplicates, note=say).tables():
        Console().print(table)
    say(f"kept prompts: {config.select_prompts.output_path}")
    return 0


def _preview(config: "Config", *, all_rows: bool) -> list[str]:
    """Tokenize the prompts that responses will be generated for. Returns lines for the dry run."""
    from megatron_rl.step.input_checks import first_prompt, load_tokenizer
    from megatron_rl.step.run_inputs import describe_prompts, scored_prompts

    tokenizer = load_tokenizer(config)
    found = scored_prompts(config, config.data.train_files, tokenizer, all_rows=all_rows)
    return [*describe_prompts(found, {}), first_prompt(found, tokenizer)]
