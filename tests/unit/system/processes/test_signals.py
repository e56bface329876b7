"""A signal ends the work once, and leaves no processes and no traceback."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_rl.system.processes.signals import (
    INTERRUPTED,
    STOP_SIGNALS,
    STOPPED,
    StopSignals,
    clean_stop,
    run_until_stopped,
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_any_task_cancels_the_whole_work(number, caplog):
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
        try:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        finally:  # a thread of another test may have taken them already, and later processes would inherit the mask
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


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_is_raised_where_nothing_else_was_agreed(number):
    before = signal.getsignal(number)
    with StopSignals(5.0).handling_signals():
        pass
    assert signal.getsignal(number) is before
    # In a process of its own: once asked to end, a process that stays is ended.
    status, said = stopped(f"with StopSignals(5.0).handling_signals(): os.kill(os.getpid(), {int(number)}); time.sleep(9)")
    assert (status, said) == (STOPPED, signal.Signals(number).name)


def test_deferred_signal_wakes_the_work_and_waits_for_it():
    work = """
woken = threading.Event()
stop = StopSignals(30.0)
with stop.handling_signals():
    with stop.defer_signals(woken.set):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert woken.wait(5.0)
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher that repeats itself
        time.sleep(0.2)
    raise StopRequested(stop.requested + " and saved")
"""
    assert stopped(work) == (STOPPED, "SIGUSR1 and saved")


def test_the_grace_ends_the_deferral_and_the_time_to_leave_ends_the_process():
    work = "stop = StopSignals(0.3)\nwith stop.handling_signals(), stop.defer_signals(print):\n os.kill(os.getpid(), 15); "
    status, said = stopped(work + "time.sleep(9)")
    assert status == STOPPED and "nothing was saved" in said
    stuck = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**30)"  # a long call of a library
    started_s = time.monotonic()
    status, said = stopped("signals.LEAVE_S = 0.3\n" + work + stuck)
    assert status == STOPPED and "ended" in said and time.monotonic() - started_s < 20


def test_second_ctrl_c_ends_a_busy_process_immediately():
    work = """
signals.LEAVE_S = 60
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
stop = StopSignals(60.0)
with stop.handling_signals(), stop.defer_signals(lambda: None): hashlib.pbkdf2_hmac('sha256', b'', b'', 2**30)
"""
    started_s = time.monotonic()
    status, said = stopped(work)
    assert status == INTERRUPTED and "at once" in said and time.monotonic() - started_s < 20


def test_signals_of_a_forked_process_do_not_reach_its_parent():
    work = """
stop = StopSignals(5.0)
with stop.handling_signals(), stop.defer_signals(print):
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    time.sleep(0.2)
assert not stop.requested
"""
    assert stopped(work) == (0, "")


def stopped(work):
    """(exit status, what was said) of a program that ends as the command line does."""
    program = f"""
import hashlib, os, signal, sys, threading, time
from megatron_rl.system.processes import signals
from megatron_rl.system.processes.signals import STOPPED, StopRequested, StopSignals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the tests' own parent ignores it
try:
    exec({work!r})
except StopRequested as stop:
    print(stop, file=sys.stderr)
    sys.exit(STOPPED)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.strip()
