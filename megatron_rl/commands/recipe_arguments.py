"""Arguments of the commands that take a recipe. Imports neither torch nor Megatron, so that a command's help is quick."""

import argparse

from megatron_rl.system.command_line.cli_types import positive_int


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, action="append", help="YAML recipe; may be repeated, later files override earlier ones")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit without starting anything")
    parser.add_argument(
        "--all-rows", action="store_true", help="tokenize every row of the data before the start (default: the first and last 1,000)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")


def add_rank_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Same as ``add_recipe_arguments``, for commands that run on ranks."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--gpus-per-node", type=positive_int, metavar="N", help="with --dry-run: GPUs per node of the planned run (default: of this node)"
    )
