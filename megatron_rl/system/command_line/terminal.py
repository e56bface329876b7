"""Output of commands on the terminal: lines and progress bars, on standard error.

Text of models, servers and user code may have escape sequences, which could recolor, retitle or rewrite the terminal.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

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


class ProgressCallback(Protocol):
    """Advances the bar; ``note`` (a loss, for example) is shown at its end."""

    def __call__(self, count: int = 1, *, note: str = "") -> None: ...


@contextmanager
def progress_bar(
    title: str, total: int, *, completed: int = 0, console: "Console | None" = None
) -> Iterator[ProgressCallback]:
    """Progress bar on ``console`` (default: standard error); shown only if the console is a terminal."""
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
