"""Prints stored responses: a table of many, or a single one with colored tokens. Plain text without a terminal.

Model output is never trusted: control characters are printed as symbols.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megatron_rl.desk.report.run_report import TokenColor, token_colors, turn_titles
from megatron_rl.desk.watch.sample_search import SampleQueryResult
from megatron_rl.system.command_line.terminal import LINES, ONE_LINE
from megatron_rl.tracking.samples_file import METRICS

_PLAIN_WIDTH = 200
_WIDE, _MEDIUM = 130, 88


def print_rows(found: SampleQueryResult, run: str) -> None:
    """Print a table of responses, and below it their number and how to see more."""
    console = _console()
    width, plain = console.width, not console.is_terminal
    table = Table(box=None, header_style="bold", pad_edge=False, expand=not plain)
    columns: list[tuple[str, str, Literal["left", "right"]]] = [("id", "step/id", "right")]
    if width >= _MEDIUM:
        columns.append(("type", "type", "left"))
    columns += [("reward", "reward", "right"), ("length", "tokens", "right")]
    columns += [("end", "end", "left")] if width >= _MEDIUM else []
    columns.append(("advantage", "adv.", "right"))
    if width >= _WIDE:
        columns += [("trained_tokens", "trained", "right"), ("mismatch", "mismatch", "right"), ("versions", "weights", "right")]
    if not any(row["type"] for row in found.rows):
        columns = [column for column in columns if column[0] != "type"]
    for _, title, justify in columns:
        table.add_column(title, justify=justify, no_wrap=True)
    # rich gives a column without a ratio the width that it needs; the texts share the rest.
    if width >= _MEDIUM:
        table.add_column("prompt", no_wrap=True, ratio=2, overflow="ellipsis")
    table.add_column("response (its end)", no_wrap=True, ratio=3, overflow="ellipsis")
    fixed = 9 * len(columns)
    for row in found.rows:
        cells = [_cell(name, row) for name, _, _ in columns]
        texts = [_tail(row["response"], max(16, width - fixed if width < _MEDIUM else (width - fixed) * 3 // 5))]
        if width >= _MEDIUM:
            texts.insert(0, _tail(row["question"], max(12, (width - fixed) * 2 // 5)))
        table.add_row(*cells, *texts)
    if found.rows:
        console.print(table)
    console.print(_footer(found, run), style="dim", highlight=False, markup=False, soft_wrap=True)


def print_response(row: Mapping[str, Any], *, color_by: str, tokens: bool) -> None:
    """Print a single response with all that is stored about it."""
    console = _console()
    _heading(console, f"step {row['step']} · response {row['id']} · group {row['group']}, sample {row['sample']}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in _facts(row):
        facts.add_row(name, Text(value.translate(LINES)))
    console.print(facts)
    _heading(console, "prompt")
    console.print(Text(row["prompt"].translate(LINES), style="dim"), soft_wrap=not console.is_terminal)
    colors, legend = token_colors(row, color_by)
    is_colored = console.is_terminal and color_by != "none"
    _heading(console, f"response, by {color_by}" if is_colored else "response")
    if legend and console.is_terminal:
        console.print(Text("  ").join(Text(f" {label} ", style=_style(color)) for label, color in legend))
    console.print(_colored(row, colors), soft_wrap=not console.is_terminal)
    if tokens:
        _heading(console, "tokens")
        console.print(_token_table(row))


def _heading(console: Console, title: str) -> None:
    console.print(Rule(title, align="left", style="dim") if console.is_terminal else f"== {title} ==", markup=False)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    return console


def _cell(name: str, row: Mapping[str, Any]) -> str:
    if name == "id":
        return f"{row['step']}/{row['id']}"
    if name == "versions":
        oldest, newest = row["oldest_version"], row["newest_version"]
        return "" if oldest is None else str(oldest) if oldest == newest else f"{oldest}-{newest}"
    value = row[name]
    if name == "reward" and value is None:
        return "failed" if row["error"] else "-"
    return _number(value) if isinstance(value, float | None) else str(value).translate(ONE_LINE)


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"


def _tail(text: str, width: int) -> Text:
    """The end of a text on one line, because the answer is at the end."""
    line = text.translate(ONE_LINE)
    return Text(line if len(line) <= width else "…" + line[1 - width :], no_wrap=True)


def _footer(found: SampleQueryResult, run: str) -> str:
    steps = f"step {found.steps[0]}" if len(found.steps) == 1 else f"steps {found.steps[0]} to {found.steps[-1]}"
    kept = f"{found.num_matches:,} of {found.num_stored:,} stored responses" if found.num_matches < found.num_stored else (
        f"{found.num_stored:,} stored responses"
    )
    shown = "" if len(found.rows) == found.num_matches else f", {len(found.rows):,} shown (--limit)"
    more = f"; one in full: megatron-rl samples {run} --show {found.rows[0]['step']}/{found.rows[0]['id']}" if found.rows else ""
    return f"{kept} in {steps}{shown}{more}"


def _facts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    reward = "not scored" if row["reward"] is None else _number(row["reward"])
    reward = reward if row["finished"] or row["reward"] is not None else "not finished"
    ends = {"stop": "ended naturally", "length": "truncated at its budget", "room": "truncated before a message", "open": "unfinished"}
    facts = [
        ("prompt", _joined(row["prompt_id"], row["type"], f"{row['prompt_tokens']} tokens")),
        ("answer", row["answer"]),
        ("reward", _joined(reward, row["detail"], row["error"])),
        *((f"  {name}", _number(value)) for name, value in sorted(row[METRICS].items())),
        *((f"  turn {turn['turn'] + 1}", _joined(_number(turn["reward"]), turn["detail"], turn["error"])) for turn in row["turns"]),
        ("dialogue", _dialogue(row)),
        ("tokens", f"{row['length']}, {ends[row['end']]}; {row['new_tokens']} sampled and {row['trained_tokens']} trained in this step"),
        ("advantage", f"{_number(row['advantage'])} (mean of the trained tokens)"),
        ("mismatch", f"{_number(row['mismatch'])} (mean of |trainer's log-prob - server's|)"),
        ("sampled", "; ".join(_describe_segment(segment) for segment in row["segments"])),
        ("", "a greedy response: a baseline that is not trained" if row["greedy"] else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _dialogue(row: Mapping[str, Any]) -> str:
    """Turns, messages, waits and fork of a dialogue; empty for a single text."""
    messages = [segment for segment in row["segments"] if segment["finish_reason"] == "message"]
    if not messages and row["parent"] is None:
        return ""
    waited = "" if row["waited_s"] is None else f"{_number(row['waited_s'])} s of the environment"
    fork = "" if row["parent"] is None else f"a further row of the episode of response {row['parent']}"
    return _joined(f"{row['num_turns']} turns, {len(messages)} messages", waited, fork)


def _joined(*parts: str) -> str:
    return " · ".join(filter(None, parts))


def _describe_segment(segment: Mapping[str, Any]) -> str:
    if segment["finish_reason"] == "message":
        return f"{segment['num_tokens']} of a message"
    role = "" if segment["role"] == "policy" else f" ({segment['role']})"
    return f"{segment['num_tokens']}{role} in step {segment['step']} by weights {segment['weight_version']}"


def _colored(row: Mapping[str, Any], colors: Sequence[TokenColor | None]) -> Text:
    text, start, titles = Text(), 0, dict(turn_titles(row))
    for index, (end, color) in enumerate(zip(row["token_ends"], colors, strict=True)):
        if index in titles:
            text.append(f"{chr(10) if index else ''}── {titles[index]} ──\n", style="bold dim")
        text.append(row["response"][start:end].translate(LINES), style=_style(color))
        start = end
    return text


def _style(color: TokenColor | None) -> str:
    if color is None:
        return ""
    red, green, blue = color
    return f"rgb(0,0,0) on rgb({red},{green},{blue})"


def _token_table(row: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    has_values = row["values"] is not None
    for title in ("token", "id", "server", "trainer", "advantage", *(["value"] if has_values else []), "trained", "weights", "step"):
        table.add_column(title, justify="left" if title == "token" else "right", no_wrap=True)
    segments = [segment for segment in row["segments"] for _ in range(segment["num_tokens"])]
    start = 0
    for index, (end, segment) in enumerate(zip(row["token_ends"], segments, strict=True)):
        numbers = [_number(row[name][index]) for name in ("rollout_logprobs", "trainer_logprobs", "advantages")]
        numbers += [_number(row["values"][index])] if has_values else []
        spelled = repr(row["response"][start:end].translate(ONE_LINE))
        trained = "yes" if row["mask"][index] else ""
        table.add_row(
            Text(spelled), str(row["token_ids"][index]), *numbers, trained, str(segment["weight_version"]), str(segment["step"])
        )
        start = end
    return table
