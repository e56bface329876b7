"""Ctrl-C and SIGTERM: the driver leaves its context managers once, cleanly; the other ranks follow it."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def clean_stop() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM raises KeyboardInterrupt on the main thread; further ones are ignored.

    The launcher repeats its signal while it waits; a second one must not cut the stopping of servers short.
    """

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, _take_no_notice)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run(work)``, cancelled by the first SIGINT or SIGTERM; KeyboardInterrupt once it has ended.

    An exception that a signal handler raises strikes whichever task runs at that moment, which may be one that nobody
    looks at. So the loop itself takes the signals here, and ``work`` leaves its context managers as on any
    cancellation. On the main thread only, inside ``clean_stop``: as there, further signals are ignored.
    """
    stopped = False

    async def cancellable() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()

        def stop() -> None:
            nonlocal stopped
            if task is not None and not stopped:
                stopped = True
                task.cancel()

        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            loop.add_signal_handler(number, stop)
        try:
            await work
        except asyncio.CancelledError:
            if not stopped:
                raise
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, _take_no_notice if stopped else handler)

    asyncio.run(cancellable())
    if stopped:
        raise KeyboardInterrupt


def _take_no_notice(signal_number: int, frame: FrameType | None) -> None:
    """In SIG_IGN's place: Python prints a traceback for a signal that has come and finds it there."""


def leave_signals_to_the_driver() -> None:
    """For the other ranks: Ctrl-C reaches every process of a terminal, but the driver decides how to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_with_parent(parent_pid: int | None = None, signal_number: int = signal.SIGTERM) -> None:
    """``signal_number`` for this process when its parent ends, so that nothing is left behind (Linux).

    Precisely: when the thread ends that started this process. With ``parent_pid``, a parent that ended before the
    kernel knew of this ends the process at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
