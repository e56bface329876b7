"""`megatron-rl presets`: list the presets, each with its source."""

import argparse

from megatron_rl.config.load import PRESETS, preset_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    for name in preset_names():
        first_line = (PRESETS / f"{name}.yaml").read_text().splitlines()[0]
        print(f"{name:16} {first_line.lstrip('# ')}")
    return 0
