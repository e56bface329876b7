"""``megatron-rl check``: replay the recorded steps of a released recipe, and say where this installation departs from them."""

import argparse
from pathlib import Path

from megatron_rl.desk.doctor.check_installation import check_installation
from megatron_rl.desk.doctor.check_task import RECORD


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", default=str(RECORD), metavar="FILE", help="a record; by default that of this release")
    parser.add_argument("--record", metavar="FILE", help="make a new record of this installation, with tokens that its servers sample")
    parser.add_argument("--trainer-only", action="store_true", help="start no server: the trainer's half alone")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe, to see what that changes")


def run(arguments: argparse.Namespace) -> int:
    record = Path(arguments.record) if arguments.record else None
    return check_installation(Path(arguments.against), record, arguments.overrides, trainer_only=arguments.trainer_only)
