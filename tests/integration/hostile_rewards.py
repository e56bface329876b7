"""Rewards that misbehave as the response requests; imported by the workers of test_rewards_runner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.data.trajectory import Score


def score(response: str, answer: str) -> "float | Score":
    """Perform the fault named by the first word of the response; otherwise return 1.0 if it equals the answer."""
    kind = response.partition(" ")[0]
    if kind in MISDEEDS:
        return MISDEEDS[kind]()
    if kind == "sleep":
        time.sleep(float(response.split()[1]))
        return 1.0
    return float(response == answer)


def crash_once(response: str, answer: str, *, mark: str) -> float:
    """Crash on the first try, told by a file that the try leaves."""
    if response == "crash" and not Path(mark).exists():
        Path(mark).touch()
        os._exit(7)
    return 1.0


def with_fields(response: str, answer: str, *, bonus: float, scale: float = 1.0) -> float:
    return scale * (len(response) + bonus)


def process_facts(response: str, answer: str) -> Score:
    """Report the worker's process, and whether it has imported torch."""
    return Score(float("torch" in sys.modules), f"{os.getpid()} {os.getppid()} {os.getpgid(0)}")


def _loop() -> float:
    while True:
        pass


def _exit() -> float:
    os._exit(3)


def _segfault() -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def _stop() -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def _memory() -> float:
    hoard = []
    while True:
        hoard.append(bytearray(1 << 24))


def _raise() -> float:
    raise ValueError("the reward's own mistake")


def _leave() -> float:
    sys.exit(5)


def _fork() -> float:
    if os.fork() == 0:
        time.sleep(1000)
    return 1.0


def _twin() -> float:
    twin = os.fork()
    if twin == 0:
        return 0.0  # into the worker's loop, in a second process
    os.waitpid(twin, 0)
    return 1.0


def _daemon() -> float:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return 1.0


def _orphan_and_crash() -> float:
    subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"], start_new_session=True)
    os._exit(4)


def _print() -> float:
    while True:
        print("x" * 1_000_000)


def _nan() -> float:
    return float("nan")


def _nothing() -> float:
    return None  # type: ignore[return-value]


MISDEEDS = {
    "loop": _loop,
    "exit": _exit,
    "segfault": _segfault,
    "stop": _stop,
    "memory": _memory,
    "raise": _raise,
    "leave": _leave,
    "fork": _fork,
    "twin": _twin,
    "daemon": _daemon,
    "orphan_and_crash": _orphan_and_crash,
    "print": _print,
    "nan": _nan,
    "nothing": _nothing,
}
