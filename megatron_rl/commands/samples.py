"""`megatron-rl samples`: the stored responses of a run, as a table or one in full."""

import argparse
import json
import re
import sys
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.system.command_line.cli_types import positive_int

COLORINGS = ("advantage", "version", "mismatch", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", help="folder of the run")
    parser.add_argument("--step", default="", help="a step, or several as 3-8; left out: all that are stored")
    parser.add_argument("--where", default="", metavar="FILTER", help="such as: reward < 0.5 and length > 200")
    parser.add_argument("--sort", default="", metavar="COLUMN", help="such as reward or length:desc; left out: newest step first")
    parser.add_argument("--limit", type=positive_int, default=20, help="most rows that are shown")
    parser.add_argument("--show", default="", metavar="ID", help="one response in full: step/id as in the table, or id in its newest step")
    parser.add_argument("--color-by", choices=COLORINGS, default="advantage", help="of --show: what colours the tokens")
    parser.add_argument("--tokens", action="store_true", help="of --show: a line per token")
    parser.add_argument("--jsonl", action="store_true", help="whole rows as JSON lines, for other programs")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.desk.watch.sample_search import find_rows, whole_rows
    from megatron_rl.desk.watch.sample_tables import print_response, print_rows
    from megatron_rl.tracking.samples_file import sample_files

    files = sample_files(arguments.output_dir)
    if not files:
        raise UserError(
            f"{arguments.output_dir}: expected the folder of a run with stored responses (samples/step_000001.parquet ...), found none; "
            "they are written with each policy update, unless tracking.samples_per_step is 0"
        )
    if arguments.show:
        step, id = _place(arguments.show, list(files))
        found = find_rows(files, steps=step, where=f"id == {id}", sort="step:desc", limit=1)
        if not found.rows:
            raise UserError(f"--show {arguments.show}: no such response is stored; `megatron-rl samples {arguments.output_dir}` lists them")
        (row,) = whole_rows(files, found.rows)
        if arguments.jsonl:
            _print_json([row])
        else:
            print_response(row, color_by=arguments.color_by, tokens=arguments.tokens)
        return 0
    steps = _steps(arguments.step, list(files)) if arguments.step else list(files)
    found = find_rows(files, steps=steps, where=arguments.where, sort=arguments.sort, limit=arguments.limit)
    if arguments.jsonl:
        _print_json(whole_rows(files, found.rows))
    else:
        print_rows(found, arguments.output_dir)
    return 0


def _steps(text: str, stored: list[int]) -> list[int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise UserError(f"--step: expected a step like 5 or several like 3-8, got {text!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    chosen = [step for step in stored if first <= step <= last]
    if not chosen:
        raise UserError(f"--step {text}: stored are {_said(stored)}")
    return chosen


def _place(text: str, stored: list[int]) -> tuple[list[int], int]:
    """(steps to look at, id)."""
    match = re.fullmatch(r"(?:(\d+)/)?(\d{1,18})", text)
    if not match:
        raise UserError(f"--show: expected step/id like 5/131, or an id, got {text!r}")
    return (_steps(match[1], stored) if match[1] else stored), int(match[2])


def _said(steps: list[int]) -> str:
    if len(steps) <= 8:
        return f"step {', '.join(map(str, steps))}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def _print_json(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        json.dump(_plain(row), sys.stdout)
        sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    """NaN as null, which any reader of JSON takes."""
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
