"""Ctrl-C and SIGTERM: the driver leaves its context managers once, cleanly; the other ranks follow it."""

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PR_SET_PDEATHSIG = 1


@contextmanager
def clean_stop() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM raises KeyboardInterrupt on the main thread; further ones are ignored.

    The launcher repeats its signal while it waits; a second one must not cut the stopping of servers short.
    """

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_signals_to_the_driver() -> None:
    """For the other ranks: Ctrl-C reaches every process of a terminal, but the driver decides how to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_with_parent() -> None:
    """SIGTERM for this process when the launcher is killed (Linux), so that no rank is left behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
