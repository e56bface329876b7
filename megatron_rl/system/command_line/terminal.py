"""Output of commands on the terminal: lines and progress bars, on standard error."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def say(text: str) -> None:
    """Print one line; ranks other than 0 add their rank."""
    rank = os.environ.get("RANK", "0")
    print(text if rank == "0" else f"rank {rank}: {text}", file=sys.stderr, flush=True)


class ProgressCallback(Protocol):
    """Advances the bar; ``note`` (a loss, for example) is shown at its end."""

    def __call__(self, count: int = 1, *, note: str = "") -> None: ...


@contextmanager
def progress_bar(
    title: str, total: int, *, completed: int = 0, console: Console | None = None
) -> Iterator[ProgressCallback]:
    """Progress bar on ``console`` (default: standard error); shown only if the console is a terminal."""
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
