"""`megatron-rl watch`: show a run on the terminal, read from the files in its folder.

    megatron-rl watch outputs/run
    megatron-rl watch outputs/run --once      # print once, for scripts, logs and pipes

The run itself is not touched, so it may belong to another user and run on any node that shares the folder. Ctrl-C
restores the screen; the view of a finished run ends automatically and stays on the screen.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.system.command_line.terminal import positive_int, positive_number
from megatron_rl.system.processes.signals import clean_stop

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_rl.desk.watch.run_view import RunView

_PLAIN_WIDTH = 100
"""Columns without a terminal and without COLUMNS."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", metavar="RUN", help="a run's folder (run.output_dir)")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.add_argument("--every", type=positive_number, default=1.0, metavar="SECONDS", help="refresh interval in seconds (default: 1)")
    width = "with --once: width of the output (default: the terminal's, $COLUMNS or 100)"
    parser.add_argument("--width", type=positive_int, metavar="COLUMNS", help=width)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_rl.desk.report.run_record import check_run_folder
    from megatron_rl.desk.watch.run_view import RunFolder
    from megatron_rl.tracking.console import SafeStream

    folder = Path(arguments.output_dir)
    check_run_folder(folder)
    console = Console(file=SafeStream(sys.stdout), highlight=False)
    watched = RunFolder(folder)
    if arguments.once or not console.is_terminal or console.is_dumb_terminal:
        knows_width = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
        width = arguments.width or (console.width if knows_width else _PLAIN_WIDTH)
        _print(console, watched.poll(), width)
        return 0
    try:
        with clean_stop():
            view = _follow(console, watched.poll, arguments.every)
    except KeyboardInterrupt:  # Ctrl-C is the normal way to leave
        return 0
    _print(console, view, console.width)
    return 0


def _follow(console: "Console", look: Callable[[], "RunView"], every_s: float) -> "RunView":
    """Redraw the screen until the run has finished. Returns the last view. A stopped or failed run may resume, so it stays."""
    from rich.live import Live

    from megatron_rl.desk.watch.watch_screen import ClippedToHeight, screen

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = look()
            live.update(ClippedToHeight(screen(view, console.width)), refresh=True)
            if view.status.state == "finished":
                return view
            time.sleep(every_s)


def _print(console: "Console", view: "RunView", width: int) -> None:
    from megatron_rl.desk.watch.watch_screen import screen

    console.width = width
    console.print(screen(view, width))
