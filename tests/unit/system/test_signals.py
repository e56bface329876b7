"""Signals: they end what runs, once, and leave nothing behind that somebody has to explain."""

import asyncio
import gc
import os
import signal
import sys

import pytest

from megatron_rl.system.signals import clean_stop, run_until_stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_any_task_cancels_the_whole(number, caplog):
    log = []

    async def unattended():
        os.kill(os.getpid(), number)  # arrives right here, as Ctrl-C may
        log.append("goes on")
        await asyncio.sleep(60)

    async def work():
        task = asyncio.create_task(unattended())
        try:
            await asyncio.sleep(60)
        finally:
            os.kill(os.getpid(), number)  # a launcher that repeats itself
            await asyncio.sleep(0)
            log.append("left")
            task.cancel()

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), clean_stop():
        try:
            run_until_stopped(work())
        finally:
            os.kill(os.getpid(), number)  # must not cut short what is being stopped
    assert log == ["goes on", "left"]
    gc.collect()
    assert not caplog.records, "asyncio complains of exceptions that nobody took"
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_two_signals_at_once_interrupt_once_and_say_nothing(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with pytest.raises(KeyboardInterrupt), clean_stop():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    assert not said


def test_without_a_signal_the_work_ends_by_itself_and_the_handlers_come_back():
    with clean_stop():
        before = signal.getsignal(signal.SIGTERM)
        run_until_stopped(asyncio.sleep(0))
        assert signal.getsignal(signal.SIGTERM) is before
        with pytest.raises(ZeroDivisionError):
            run_until_stopped(_fail())


async def _fail():
    raise ZeroDivisionError
