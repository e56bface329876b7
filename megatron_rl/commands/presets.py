"""`megatron-rl presets`: list the presets, each with its source."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.config.load import PRESETS, preset_names

    for name in preset_names():
        first_line = (PRESETS / f"{name}.yaml").read_text().splitlines()[0]
        print(f"{name:20} {first_line.lstrip('# ')}")
    return 0
