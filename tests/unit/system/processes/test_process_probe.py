"""A probe shows the notes and stacks of another process."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict

from megatron_rl.system.processes.process_probe import Frame, ProcessSnapshot, main_frames, probe

SAYS = r"""
import faulthandler, os, sys, time
from megatron_rl.system.processes import process_probe as doing
doing.enable_probe("the test")
doing.set_status("work", "something")
doing.set_status("work", "long " * 500)
doing.set_status("other", "gone soon")
doing.set_status("other")
child = os.fork()
if child == 0:
    doing.set_status("work", "a child's")
def innermost():
    os.write(1, b"%d\n" % os.getpid())
    time.sleep(30)
innermost()
"""


def test_process_and_its_fork_have_separate_notes():
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(SAYS)], stdout=subprocess.PIPE, text=True) as process:
        pids = sorted({int(process.stdout.readline()), int(process.stdout.readline())}, key=lambda pid: pid != process.pid)
        try:
            for _ in range(2):  # asking twice reads the second answer
                parent, child = probe(pids, "here")
                assert (parent.pid, child.pid) == tuple(pids)
                for seen in (parent, child):
                    assert seen.role == "the test" and seen.state == "sleeping" and seen.cpu_share < 0.5
                    assert [frame.function for frame in seen.frames] == ["innermost", "<module>"]
                assert set(parent.notes) == {"work"} and parent.notes["work"][0].startswith("long long")
                assert child.notes["work"][0] == "a child's"
            assert ProcessSnapshot.from_json(json.loads(json.dumps(asdict(parent)))) == parent
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


def test_a_process_that_does_not_listen_gets_no_signal_and_one_that_is_gone_is_so():
    with subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(100)"], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        (seen,) = probe([process.pid], "here")
        assert seen.role == "" and seen.frames == () and "time.sleep(100)" in seen.command
        assert process.poll() is None
        process.kill()
    (seen,) = probe([process.pid], "here")
    assert seen.state == "gone"


def test_main_frames_fall_back_to_the_last_thread():
    text = 'Thread 0x00000002 (most recent call first):\n  File "a.py", line 3 in f\n\n' + (
        'Current thread 0x00000001 (most recent call first):\n  File "b.py", line 4 in g\n  File "c d.py", line 5 in <module>\n'
    )
    assert main_frames(text, 2) == (Frame("a.py", 3, "f"),)
    assert main_frames(text, 7) == main_frames(text, 1) == (Frame("b.py", 4, "g"), Frame("c d.py", 5, "<module>"))
    assert main_frames("", 1) == ()
