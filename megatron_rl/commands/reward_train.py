"""`megatron-rl reward-train`: train a reward model on preferences or line labels."""

import argparse

from megatron_rl.commands import print_dry_run
from megatron_rl.config.schema import Config, RewardModelKind
from megatron_rl.errors import ConfigError
from megatron_rl.run.launch import add_rank_recipe_arguments, run_on_ranks

add_arguments = add_rank_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    return run_on_ranks("reward-train", arguments, check_inputs=_check_inputs, print_plan=print_dry_run, work=_work)


def _check_inputs(config: Config) -> None:
    from megatron_rl.data.preferences import check_reward_files, load_preferences
    from megatron_rl.rewards.judges.pairwise import training_texts

    check_reward_files(config)
    settings = config.reward_train
    if settings.kind is not RewardModelKind.pairwise:
        return
    if config.data.system_prompt:
        raise ConfigError("data.system_prompt: a judge gets no system message; leave this key empty")
    for row in load_preferences([*settings.train_files, *settings.eval_files], config.data):
        training_texts(
            row.content.text, row.chosen, row.rejected, place=row.content.place, tokenizer_path=config.policy.path
        )


def _work(config: Config) -> None:
    from megatron_rl.supervised.reward_training import reward_train

    reward_train(config)
