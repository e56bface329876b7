"""The progress bar of every command."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Advance(Protocol):
    """Moves the bar; ``note`` is shown at its end (a loss, say)."""

    def __call__(self, count: int = 1, *, note: str = "") -> None: ...


@contextmanager
def progress_bar(
    title: str, total: int, *, completed: int = 0, console: Console | None = None, shown: bool | None = None
) -> Iterator[Advance]:
    """A bar on ``console`` (standard error), shown where that is a terminal unless ``shown`` says otherwise."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    is_shown = console.is_terminal if shown is None else shown
    with Progress(*columns, console=console, disable=not is_shown) as progress:
        task = progress.add_task(title, total=total, completed=completed, note="")

        def advance(count: int = 1, *, note: str = "") -> None:
            progress.update(task, advance=count, note=note)

        yield advance
