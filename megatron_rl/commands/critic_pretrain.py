"""`megatron-rl critic-pretrain`: pretrain the critic on responses of the frozen policy."""

import argparse

from megatron_rl.commands import add_rank_recipe_arguments
from megatron_rl.commands.train import run_training

add_arguments = add_rank_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    return run_training("critic-pretrain", arguments)
