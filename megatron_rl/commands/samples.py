"""`megatron-rl samples`: show the stored responses of a run, as a table or a single one in full."""

import argparse
import json
import re
import sys
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.system.command_line.terminal import positive_int

COLORINGS = ("advantage", "version", "mismatch", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", help="folder of the run")
    parser.add_argument("--step", default="", help="a step, or a range such as 3-8 (default: all stored steps)")
    parser.add_argument("--where", default="", metavar="FILTER", help="show only matching rows, such as: reward < 0.5 and length > 200")
    parser.add_argument("--sort", default="", metavar="COLUMN", help="sort key, such as reward or length:desc (default: newest step first)")
    parser.add_argument("--limit", type=positive_int, default=20, help="largest number of rows to show (default: %(default)s)")
    parser.add_argument("--show", default="", metavar="ID", help="show one response: step/id as in the table, or id in its newest step")
    parser.add_argument("--color-by", choices=COLORINGS, default="advantage", help="with --show: value that sets the token colors")
    parser.add_argument("--tokens", action="store_true", help="with --show: print a line per token")
    parser.add_argument("--jsonl", action="store_true", help="print complete rows as JSON lines")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.desk.watch.sample_search import find_rows, whole_rows
    from megatron_rl.desk.watch.sample_tables import print_response, print_rows
    from megatron_rl.tracking.samples_file import sample_files

    files = sample_files(arguments.output_dir)
    if not files:
        raise UserError(
            f"{arguments.output_dir}: expected the folder of a run with stored responses (samples/step_000001.parquet ...), got none; "
            "each policy update stores some, unless tracking.samples_per_step is 0"
        )
    if arguments.show:
        step, id = _parse_id(arguments.show, list(files))
        matches = find_rows(files, steps=step, where=f"id == {id}", sort="step:desc", limit=1)
        if not matches.rows:
            raise UserError(f"--show {arguments.show}: no such response is stored; `megatron-rl samples {arguments.output_dir}` lists them")
        (row,) = whole_rows(files, matches.rows)
        if arguments.jsonl:
            _print_json([row])
        else:
            print_response(row, color_by=arguments.color_by, tokens=arguments.tokens)
        return 0
    steps = _steps(arguments.step, list(files)) if arguments.step else list(files)
    matches = find_rows(files, steps=steps, where=arguments.where, sort=arguments.sort, limit=arguments.limit)
    if arguments.jsonl:
        _print_json(whole_rows(files, matches.rows))
    else:
        print_rows(matches, arguments.output_dir)
    return 0


def _steps(text: str, stored: list[int]) -> list[int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise UserError(f"--step: expected a step like 5 or several like 3-8, got {text!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    chosen = [step for step in stored if first <= step <= last]
    if not chosen:
        raise UserError(f"--step {text}: stored are {_describe(stored)}")
    return chosen


def _parse_id(text: str, stored: list[int]) -> tuple[list[int], int]:
    """Parse the value of ``--show``, ``step/id`` or ``id``. Returns (steps to search, response id).

    Without a step, all ``stored`` steps are searched. Raises UserError for other text and for a step that is not stored.
    """
    match = re.fullmatch(r"(?:(\d+)/)?(\d{1,18})", text)
    if not match:
        raise UserError(f"--show: expected step/id like 5/131, or an id, got {text!r}")
    return (_steps(match[1], stored) if match[1] else stored), int(match[2])


def _describe(steps: list[int]) -> str:
    if len(steps) <= 8:
        return f"step {', '.join(map(str, steps))}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def _print_json(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        json.dump(_plain(row), sys.stdout)
        sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    """Copy of a JSON value with every NaN, at any depth, replaced by None, because many JSON readers reject NaN."""
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
