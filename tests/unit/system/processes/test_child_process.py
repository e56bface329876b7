"""Child processes receive their message, die with the thread that started them, and leave signals to their parent."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_rl.system.processes.child_process import (
    WITHOUT_GPU,
    describe_end,
    is_secret,
    new_secret,
    pack_frame,
    read_frame,
    receive_frame,
    start_module,
    start_on_own_thread,
    wait_or_kill,
)

CHILD = "tests.unit.system.processes.test_child_process"


def child() -> None:
    """The started process: tells its arguments, environment and message, and waits for a signal."""
    from megatron_rl.system.processes.child_process import begin_child, read_secret

    parent_pid, *words = sys.argv[1:]
    begin_child(int(parent_pid))
    print(words, os.environ["OMP_NUM_THREADS"], repr(os.environ["CUDA_VISIBLE_DEVICES"]), read_secret().hex(), flush=True)
    while True:
        time.sleep(60)


def start(secret: bytes = b"") -> subprocess.Popen[bytes]:
    return start_module(CHILD, "word", 7, message=secret, stdout=subprocess.PIPE, environment=WITHOUT_GPU)


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def test_a_child_gets_arguments_environment_and_a_secret_and_ignores_stop_signals():
    secret = new_secret()
    process = start(secret)
    assert line_of(process) == f"['word', '7'] 1 '' {secret.hex()}"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    assert os.getsid(process.pid) == process.pid, "a session of its own"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    wait_or_kill(process, 0.0, 10.0, group=True)
    assert describe_end(process.returncode) == "died of SIGKILL"


def test_a_child_dies_with_the_thread_that_started_it_unless_it_has_a_thread_of_its_own():
    started: list[subprocess.Popen[bytes]] = []

    def short_lived() -> None:
        started.append(start())
        started.append(start_on_own_thread(start, "child"))
        for process in started:
            line_of(process)

    thread = threading.Thread(target=short_lived)
    thread.start()
    thread.join()
    mortal, lasting = started
    assert mortal.wait(10) == -signal.SIGKILL
    assert lasting.poll() is None
    lasting.kill()
    assert lasting.wait(10) == -signal.SIGKILL


def test_a_start_that_fails_raises_its_own_error():
    with pytest.raises(FileNotFoundError):
        start_on_own_thread(lambda: subprocess.Popen(["/no/such/program"]), "child")


def test_a_child_that_ends_before_it_reads_its_message_shows_that_by_its_end():
    process = start_module("no_such_module", message=b"x" * (1 << 20))
    assert describe_end(process.wait(10)) == "exited with code 1"


def test_end_of_a_process_is_described_by_status_or_signal():
    assert describe_end(0) == "exited with code 0"
    assert describe_end(-signal.SIGXCPU) == "died of SIGXCPU (used up its CPU time)"


def test_only_the_whole_secret_is_the_secret():
    secret = new_secret()
    assert is_secret(bytes(secret), secret) and secret != new_secret()
    assert not is_secret(secret[:-1], secret)


def test_frames_come_back_as_they_were_sent():
    messages = [{"text": "\ud800\0é"}, [], [1.5, None, True]]
    content = b"".join(map(pack_frame, messages))
    stream = io.BytesIO(content)
    assert [read_frame(stream) for _ in messages] == messages and read_frame(stream) is None

    async def received(max_bytes: int) -> list[object]:
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        return [await receive_frame(reader, max_bytes) for _ in messages]

    assert asyncio.run(received(100)) == messages
    with pytest.raises(ValueError, match="expected at most 10"):
        asyncio.run(received(10))


if __name__ == "__main__":
    child()
