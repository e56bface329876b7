"""`megatron-rl dpo`: train a policy on preferences by direct preference optimization."""

import argparse
from typing import TYPE_CHECKING

from megatron_rl.commands import add_rank_recipe_arguments, print_dry_run
from megatron_rl.system.processes.gc_pauses import gc_disabled

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config

add_arguments = add_rank_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    with gc_disabled():
        from megatron_rl.run.launch import run_on_ranks

    return run_on_ranks("dpo", arguments, check_inputs=_check_inputs, print_plan=print_dry_run, work=_work)


def _check_inputs(config: "Config", *, all_rows: bool) -> list[str]:
    from megatron_rl.commands.reward_train import describe_examples
    from megatron_rl.data.preferences import check_reward_files
    from megatron_rl.step.input_checks import load_tokenizer
    from megatron_rl.supervised.preference_optimization import PreferencePairs
    from megatron_rl.supervised.reward_training import load_examples

    check_reward_files(config, "dpo")
    tokenizer = load_tokenizer(config)
    examples, notes = load_examples(config, PreferencePairs(config, tokenizer), "dpo")
    return [*notes, *describe_examples(examples, (config.dpo.train_files, config.dpo.eval_files), tokenizer)]


def _work(config: "Config") -> None:
    from megatron_rl.supervised.preference_optimization import dpo

    dpo(config)
