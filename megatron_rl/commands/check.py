"""``megatron-rl check``: replay the recorded steps of a released recipe, and report where this installation deviates from them."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="FILE", help="record to compare with (default: this release's)")
    parser.add_argument("--record", metavar="FILE", help="write a new record of this installation, with tokens sampled by its servers")
    parser.add_argument("--trainer-only", action="store_true", help="start no server; check only the trainer")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe, to see the effect")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.desk.doctor.check_installation import check_installation
    from megatron_rl.desk.doctor.check_task import RECORD

    record = Path(arguments.record) if arguments.record else None
    return check_installation(Path(arguments.against or RECORD), record, arguments.overrides, trainer_only=arguments.trainer_only)
