"""`megatron-rl sft`: train a policy on reference responses, as a supervised warm start."""

import argparse

from megatron_rl.commands import print_dry_run
from megatron_rl.config.schema import Config
from megatron_rl.run.launch import add_rank_recipe_arguments, run_on_ranks

add_arguments = add_rank_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    return run_on_ranks("sft", arguments, check_inputs=_check_inputs, print_plan=print_dry_run, work=_work)


def _check_inputs(config: Config) -> None:
    from megatron_rl.config.derived import model_has_vision
    from megatron_rl.data.prompts import check_files

    files = config.sft.train_files or config.data.train_files
    check_files(files, config.data, with_response=True, takes_images=model_has_vision(config))


def _work(config: Config) -> None:
    from megatron_rl.supervised.fine_tuning import sft

    sft(config)
