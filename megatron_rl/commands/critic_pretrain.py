"""`megatron-rl critic-pretrain`: pretrain the critic on responses of the frozen policy."""

import argparse

from megatron_rl.commands import print_dry_run, write_run_report
from megatron_rl.config.schema import Config
from megatron_rl.run.launch import add_rank_recipe_arguments, run_on_ranks
from megatron_rl.step.input_checks import check_rl_inputs
from megatron_rl.system.processes.gc_pauses import gc_disabled

add_arguments = add_rank_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    return run_on_ranks(
        "critic-pretrain",
        arguments,
        check_inputs=check_rl_inputs,
        print_plan=print_dry_run,
        work=_work,
        writes_output_dir=True,
    )


def _work(config: Config) -> None:
    from megatron_rl.rollout.server_pool import spawned_servers

    # Start the servers before Megatron is imported, so that both load their libraries in parallel.
    with spawned_servers(config) as servers:
        with gc_disabled():
            from megatron_rl.step.driver import critic_pretrain

        critic_pretrain(config, servers, write_run_report)
