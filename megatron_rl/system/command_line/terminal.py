"""Arguments and output of commands: types for argparse whose errors name the flag; lines and progress bars on standard error.

Text of models, servers and user code may have escape sequences, which could recolor, retitle or rewrite the terminal.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_BIDI_CONTROLS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of the text after them, and so can hide its order."""
_SYMBOLS = {code: chr(0x2400 + code) for code in range(32)} | {0x7F: "␡"}
_SYMBOLS |= {code: "·" for code in (*range(0x80, 0xA0), *_BIDI_CONTROLS)}
ONE_LINE = _SYMBOLS | {ord("\n"): "⏎", ord("\t"): "⇥"}
"""Table for ``str.translate``: every control character becomes a symbol."""
LINES = {code: symbol for code, symbol in _SYMBOLS.items() if code != ord("\n")} | {ord("\t"): "    "}
"""Same as ``ONE_LINE``, but lines stay lines, and a tab becomes spaces."""


def say(text: str) -> None:
    """Print one line, without control characters; ranks other than 0 add their rank."""
    rank, text = os.environ.get("RANK", "0"), text.translate(LINES)
    print(text if rank == "0" else f"rank {rank}: {text}", file=sys.stderr, flush=True)


def show(*texts: str) -> None:
    """Print results on standard output, without control characters."""
    for text in texts:
        print(text.translate(LINES))


@contextmanager
def progress_bar(
    title: str, total: int, *, completed: int = 0, console: "Console | None" = None
) -> Iterator[Callable[..., None]]:
    """Progress bar on ``console`` (default: standard error); shown only if the console is a terminal.

    The yielded function (count = 1, note = "") advances the bar; ``note`` (a loss, for example) is shown at its end.
    """
    # Most commands print lines alone, and their help should not wait for this import.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total, completed=completed, note="")

        def advance(count: int = 1, *, note: str = "") -> None:
            progress.update(task, advance=count, note=note)

        yield advance


def positive_int(text: str) -> int:
    """Parse a whole number above 0. Raises ArgumentTypeError, which argparse prints with the flag."""
    if not text.isdecimal() or not 0 < len(text) < 16 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def number_or_word(text: str) -> int | str:
    """Parse one of an option's whole numbers above 0; a recipe or an override that follows them stays text."""
    return text if "=" in text or text.endswith((".yaml", ".yml")) else positive_int(text)


def keep_numbers(arguments: argparse.Namespace, option: str) -> None:
    """Move the text that ``number_or_word`` kept from an option to ``arguments.words``."""
    values = getattr(arguments, option) or []
    arguments.words = [*arguments.words, *(value for value in values if isinstance(value, str))]
    setattr(arguments, option, [value for value in values if isinstance(value, int)])


def positive_number(text: str) -> float:
    """Parse a number above 0 and at most 1e7 (four months in seconds). Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e7:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1e7, got {text!r}")
    return number


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(paths of recipes, ``key=value`` overrides)."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` overrides to options; values are YAML, dots nest."""
    from omegaconf import OmegaConf

    options = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    return {str(key): value for key, value in options.items()} if isinstance(options, dict) else {}
