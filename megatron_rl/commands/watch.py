"""`megatron-rl watch`: a run on the terminal, from the files in its folder.

    megatron-rl watch outputs/run
    megatron-rl watch outputs/run --once      # a single print: for scripts, logs and pipes

Nothing of the run is touched, so it may be anyone's and on any machine that sees the folder. Ctrl-C leaves the screen as
it was; the view of a run that has finished ends by itself and stays.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.errors import DataError
from megatron_rl.system.command_line.cli_types import positive_int, positive_number
from megatron_rl.system.processes.signals import clean_stop

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_rl.desk.watch.run_view import RunView

_PLAIN_WIDTH = 100
"""Where there is no terminal whose width could be asked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", metavar="RUN", help="a run's folder (run.output_dir)")
    parser.add_argument("--once", action="store_true", help="print the present state and exit")
    parser.add_argument("--every", type=positive_number, default=1.0, metavar="SECONDS", help="look so often (1)")
    parser.add_argument("--width", type=positive_int, metavar="COLUMNS", help="draw for so many columns, with --once")


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_rl.desk.watch.run_view import RunFolder
    from megatron_rl.tracking.terminal.console import SafeStream

    folder = Path(arguments.output_dir)
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a run (its run.output_dir), found {_what_is(folder)}")
    console = Console(file=SafeStream(sys.stdout), highlight=False)
    watched = RunFolder(folder)
    if arguments.once or not console.is_terminal or console.is_dumb_terminal:
        width = arguments.width or (console.width if console.is_terminal else _PLAIN_WIDTH)
        _print(console, watched.poll(), width)
        return 0
    try:
        with clean_stop():
            view = _follow(console, watched.poll, arguments.every)
    except KeyboardInterrupt:  # how one leaves it
        return 0
    _print(console, view, console.width)
    return 0


def _follow(console: "Console", look: Callable[[], "RunView"], every_s: float) -> "RunView":
    """Redraw the whole screen until the run has finished; the view then. A run that stopped or failed may go on."""
    from rich.live import Live

    from megatron_rl.desk.watch.watch_screen import ClippedToHeight, screen

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = look()
            live.update(ClippedToHeight(screen(view, console.width)), refresh=True)
            if view.status.state == "finished":
                return view
            time.sleep(every_s)


def _what_is(path: Path) -> str:
    return "a file" if path.exists() else "nothing there"


def _print(console: "Console", view: "RunView", width: int) -> None:
    from megatron_rl.desk.watch.watch_screen import screen

    console.width = width
    console.print(screen(view, width))
