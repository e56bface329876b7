"""Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP: how a process that is asked to end does so.

A training run stops in order (``StopSignals``): where it says that it can, it finishes or abandons what it does, saves,
and leaves with the exit status ``STOPPED``, for which a scheduler starts it again. The requester waits at most
the grace and ``LEAVE_S``. A second Ctrl-C ends it at once. Other commands leave their context managers on the first
signal (``clean_stop``).
"""

import asyncio
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
"""Exit status of a run that was asked to stop and goes on with run.resume (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
"""Exit status of what was interrupted and does not go on: 128 + SIGINT, as shells have it."""
LEAVE_S = 20.0
"""After the grace: report, trackers and servers are closed in this time, or the process ends without them."""

_PR_SET_PDEATHSIG = 1
_NO_SIGNAL = 0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequested(KeyboardInterrupt):
    """The run was asked to end and can go on later; its text is for the user."""


class StopSignals:
    """Hears the stop signals of this process, also while its main thread is inside a library's call.

    The first one raises ``StopRequested`` on the main thread. Inside ``deferred`` it only wakes who looks at
    ``requested``, and is raised once the grace has passed. A process that still runs ``LEAVE_S`` after that is killed. Later
    signals say nothing, but for a second Ctrl-C, which ends the process at once: what it started dies with it. Without
    the parent that started this process there is no grace.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._wake: Callable[[], None] | None = None
        self._process, self._parent = os.getpid(), os.getppid()
        self.requested = ""
        """The name of the signal that came first; empty before that."""

    @contextmanager
    def handling_signals(self) -> Iterator["StopSignals"]:
        """On the main thread only. SIGHUP stays ignored where it is (nohup)."""
        numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = {number: signal.signal(number, self._on_signal) for number in (*numbers, signal.SIGALRM)}
        wakeup_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True)
        listener.start()
        try:
            yield self
        finally:
            if not self.requested:  # else nothing may cut the way out short, and it still has its limit
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(wakeup_before)
                os.write(write, bytes([_NO_SIGNAL]))
                listener.join()
                os.close(write)

    @contextmanager
    def defer_signals(self, wake: Callable[[], None]) -> Iterator[None]:
        """Inside, ``wake`` is called on another thread when a signal has come: the main thread has the grace to leave."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """On the main thread, once it runs Python again."""
        if os.getpid() != self._process:  # a process forked from this one is its parent's to end
            return
        if number == signal.SIGALRM:
            if self._wake is not None:
                raise StopRequested(f"{self.requested}: nothing was saved within the {self._grace_s:g} s of run.stop_grace_s")
        elif not self.requested:
            self.requested = signal.Signals(number).name
            if self._wake is None:
                raise StopRequested(self.requested)

    def _listen(self, pipe: int) -> None:
        """Python writes the number of every signal into the pipe, whatever the main thread is doing."""
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
        _end(f"not gone {LEAVE_S:g} s after the grace that followed {signal.Signals(number).name}: ended", STOPPED)


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


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside, a stop signal raises ``StopRequested``: for what has nothing to save and started nothing yet."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(signal.Signals(number).name)

    before = {n: signal.signal(n, stop) for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_signals_to_the_driver() -> None:
    """For the other ranks: a signal may reach every process of a job, but the driver decides how to stop.

    They end when it says so or is gone, and when the launcher dies.
    """
    die_with_parent(signal_number=signal.SIGKILL)
    for number in STOP_SIGNALS:
        signal.signal(number, _take_no_notice)


def _end(text: str, status: int) -> None:
    """Without any clean-up; servers and graders are killed by the kernel when this process is gone."""
    print(text, file=sys.stderr, flush=True)
    os._exit(status)


def _leave_the_parents_signals() -> None:
    """In a forked process: what it gets is not for the pipe of its parent."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_the_parents_signals)


def die_with_parent(parent_pid: int | None = None, signal_number: int = signal.SIGTERM) -> None:
    """``signal_number`` for this process when its parent ends, so that nothing is left behind (Linux).

    Precisely: when the thread ends that started this process. With ``parent_pid``, a parent that ended before the
    kernel knew of this ends the process at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
