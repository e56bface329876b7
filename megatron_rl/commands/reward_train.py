"""`megatron-rl reward-train`: a reward model from preferences or line labels."""

import argparse

from megatron_rl.commands.recipe import add_recipe, run_on_ranks
from megatron_rl.config.schema import Config

add_arguments = add_recipe


def run(arguments: argparse.Namespace) -> int:
    return run_on_ranks("reward-train", arguments, check_inputs=_check_inputs, work=_work)


def _check_inputs(config: Config) -> None:
    from megatron_rl.data.preferences import check_reward_files

    check_reward_files(config)


def _work(config: Config) -> None:
    from megatron_rl.supervised.reward_training import reward_train

    reward_train(config)
