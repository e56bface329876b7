"""`megatron-rl train`: train a policy with reinforcement learning."""

import argparse
from functools import partial
from typing import TYPE_CHECKING

from megatron_rl.commands import add_rank_recipe_arguments, print_dry_run, write_run_report
from megatron_rl.system.processes.gc_pauses import gc_disabled

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config

add_arguments = add_rank_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    return run_training("train", arguments)


def run_training(command: str, arguments: argparse.Namespace) -> int:
    """Run ``command``, train or critic-pretrain, on ranks and rollout servers. Returns the exit status."""
    with gc_disabled():
        from megatron_rl.run.launch import run_on_ranks
        from megatron_rl.step.input_checks import preview_rl_inputs

    return run_on_ranks(
        command,
        arguments,
        check_inputs=preview_rl_inputs,
        print_plan=print_dry_run,
        work=partial(_work, command),
        writes_output_dir=True,
    )


def _work(command: str, config: "Config") -> None:
    from megatron_rl.rollout.server_pool import spawned_servers

    # Start the servers before Megatron is imported, so that both load their libraries in parallel.
    with spawned_servers(config) as servers:
        with gc_disabled():
            from megatron_rl.step import driver

        train = driver.critic_pretrain if command == "critic-pretrain" else driver.train
        train(config, servers, write_run_report)
