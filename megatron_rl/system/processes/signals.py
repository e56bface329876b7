"""Handles Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP.

A training run stops in order (``StopSignals``): inside ``defer_signals`` it completes or abandons its stages, saves, and exits
with status ``STOPPED``, which tells a scheduler to restart it. This takes at most the grace period plus ``LEAVE_S``. A second
Ctrl-C ends the run immediately. Other commands leave their context managers on the first signal (``clean_stop``).
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPED = 75
"""Exit status of a stopped run that run.resume continues (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
"""Exit status of an interrupted command that cannot resume: 128 + SIGINT, the convention of shells."""
LEAVE_S = 20.0
"""Seconds after the grace period in which report, trackers and servers must close; then the process is ended."""

_PR_SET_PDEATHSIG = 1
_NO_SIGNAL = 0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequested(KeyboardInterrupt):
    """A stop signal ended the run, which can resume later. The exception's text is for the user."""


class StopSignals:
    """Receives the stop signals of this process, also while its main thread is inside a library call.

    The first signal raises ``StopRequested`` on the main thread. Inside ``defer_signals`` it only calls ``wake`` and sets
    ``requested``, and the exception follows at the end of the grace period. A process that still runs ``LEAVE_S`` later is
    ended. Later signals are ignored, except a second Ctrl-C, which ends the process and all its children immediately. If the
    parent of this process has died, there is no grace period.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._wake: Callable[[], None] | None = None
        self._process, self._parent = os.getpid(), os.getppid()
        self.requested = ""
        """Name of the first signal; empty before it."""

    @contextmanager
    def handling_signals(self) -> Iterator["StopSignals"]:
        """Install the handlers (main thread only). SIGHUP stays ignored if it was ignored (nohup)."""
        numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        read, write = os.pipe()
        # ``set_wakeup_fd`` accepts no other descriptor: a full pipe would block the signal handler.
        os.set_blocking(write, False)
        before = {number: signal.signal(number, self._on_signal) for number in (*numbers, signal.SIGALRM)}
        wakeup_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True)
        listener.start()
        try:
            yield self
        finally:
            if not self.requested:  # after a signal the handlers stay, so that the clean-up is neither interrupted nor unlimited
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(wakeup_before)
                os.write(write, bytes([_NO_SIGNAL]))
                listener.join()
                os.close(write)

    @contextmanager
    def defer_signals(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call ``wake`` on another thread when a signal arrives inside the block; the main thread then has the grace period to leave it."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal on the main thread, once it executes Python code again."""
        if os.getpid() != self._process:  # a forked process is ended by its parent
            return
        if number == signal.SIGALRM:
            if self._wake is not None:
                raise StopRequested(f"{self.requested}: nothing was saved within the {self._grace_s:g} s of run.stop_grace_s")
        elif not self.requested:
            self.requested = signal.Signals(number).name
            if self._wake is None:
                raise StopRequested(self.requested)

    def _listen(self, pipe: int) -> None:
        """Read the number of each signal from the pipe; Python writes it there even while the main thread is inside a library call."""
        number = os.read(pipe, 1)[0]
        if number != _NO_SIGNAL:
            threading.Thread(target=self._end_in_time, args=(number,), name="end-in-time", daemon=True).start()
        while number != _NO_SIGNAL:
            number = os.read(pipe, 1)[0]
            if number == signal.SIGINT:
                _end("stopped at once, by a second Ctrl-C", INTERRUPTED)
        os.close(pipe)

    def _end_in_time(self, number: int) -> None:
        orphaned = os.getppid() != self._parent
        if self._wake is not None:
            self._wake()
        time.sleep(0.0 if orphaned else self._grace_s)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        time.sleep(LEAVE_S)
        _end(f"still running {LEAVE_S:g} s after the grace period that followed {signal.Signals(number).name}: ended", STOPPED)


@contextmanager
def clean_stop() -> Iterator[None]:
    """Raise KeyboardInterrupt on the main thread at the first SIGINT or SIGTERM inside the block, and ignore further ones.

    A launcher repeats its signal while it waits, and the second signal must not interrupt the clean-up of servers.
    """

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, _ignore)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run ``asyncio.run(work)`` and cancel it at the first SIGINT or SIGTERM. Raises KeyboardInterrupt once it has ended.

    An exception from a signal handler would be raised in the task that runs at that moment, and possibly be lost with it. The
    event loop therefore handles the signals, and ``work`` leaves its context managers as on any cancellation. Must be called
    on the main thread, inside ``clean_stop``; further signals are ignored.
    """
    import asyncio  # a twentieth of a second, which a command's help need not take

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
                signal.signal(number, _ignore if stopped else handler)

    asyncio.run(cancellable())
    if stopped:
        raise KeyboardInterrupt


def _ignore(signal_number: int, frame: FrameType | None) -> None:
    """Replaces SIG_IGN, with which Python prints a traceback for a signal that has already arrived."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise ``StopRequested`` at a stop signal inside the block, for code that has nothing to save and has started nothing."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(signal.Signals(number).name)

    before = {n: signal.signal(n, stop) for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_signals_to_the_driver() -> None:
    """Ignore stop signals on a rank other than the driver: a signal may reach every process of a job, but the driver decides.

    Such a rank ends when the driver ends it or exits, and when the launcher dies.
    """
    die_with_parent(signal_number=signal.SIGKILL)
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore)


def _end(text: str, status: int) -> None:
    """Exit without any clean-up; the kernel then kills servers and reward workers."""
    print(text, file=sys.stderr, flush=True)
    os._exit(status)


def _leave_the_parents_signals() -> None:
    """Disconnect a forked process from its parent's signal pipe."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_the_parents_signals)


def die_with_parent(parent_pid: int | None = None, signal_number: int = signal.SIGTERM) -> None:
    """Have the kernel send ``signal_number`` to this process when the parent thread that started it ends (Linux).

    With ``parent_pid``, the process exits immediately if that parent has already ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
