"""`megatron-rl report`: report.html of a run, from what it has written so far."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.tracking.run_report import write_report

    print(write_report(arguments.output_dir))
    return 0
