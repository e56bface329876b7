"""`megatron-rl score`: scores a file of responses (rewards/score_file.py)."""

import argparse
import os

from megatron_rl.system.command_line.terminal import parse_options, positive_int, positive_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reward", required=True, help="a registered reward, package.module:function or path/file.py:function")
    parser.add_argument("--input", required=True, help="JSONL with the fields response and answer")
    parser.add_argument("--output", required=True, help="JSONL file to write: input rows with score, detail and error")
    parser.add_argument("--num-workers", type=positive_int, default=os.cpu_count() or 1, help="worker processes (default: one per core)")
    parser.add_argument("--max-concurrency", type=positive_int, default=256, help="rows in progress, for rewards that call a server")
    parser.add_argument("--timeout-s", type=positive_number, default=5.0, help="time limit per row (default: %(default)s)")
    parser.add_argument("options", nargs="*", metavar="key=value", help="options of the reward")


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_rl.rewards.score_file import score_file

    summary = score_file(
        arguments.reward,
        arguments.input,
        arguments.output,
        num_workers=arguments.num_workers,
        max_concurrency=arguments.max_concurrency,
        timeout_s=arguments.timeout_s,
        options=parse_options(arguments.options),
    )
    Console().print(summary.table())
    return 0
