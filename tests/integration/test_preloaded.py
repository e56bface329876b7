"""Processes that the tests fork from a template are those that would have started as usual."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.integration.preloaded import preloading
from tests.integration.torchrun import REPOSITORY

FACTS = """
import json, os, sys
facts = {"argv": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd(), "parent": os.getppid(), "input": sys.stdin.read()}
facts["forked"] = "tests.integration.preloaded" in sys.modules
print(json.dumps(facts | {"leads": os.getsid(0) == os.getpid(), "fds": sorted(os.listdir("/proc/self/fd"))[:3]}), flush=True)
print("to standard error", file=sys.stderr)
sys.exit(7)
"""


def start(folder, text, variables=None, **options):
    (folder / "module.py").write_text(text)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "SAID": "1"} | (variables or {})
    command = [sys.executable, "-m", "tests.integration.forked_ranks", "1", "module", "-u", "last words"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with preloading():
        return subprocess.Popen(command, cwd=folder, env=env, text=True, **pipes, **options)


def facts_of(process):
    output, errors = process.communicate("words", timeout=100)
    return json.loads(output) | {"status": process.returncode, "errors": errors}


@pytest.mark.parametrize("new_session", [True, False])
def test_a_forked_process_has_everything_from_the_process_that_asked(tmp_path, new_session):
    facts = facts_of(start(tmp_path, FACTS, start_new_session=new_session))
    assert facts["forked"] and facts["parent"] == os.getpid() and facts["leads"] == new_session
    assert facts["argv"] == ["-u", "last words"] and facts["input"] == "words" and facts["cwd"] == str(tmp_path)
    assert facts["status"] == 7 and facts["errors"] == "to standard error\n"


def test_a_process_with_a_variable_that_a_fork_reads_too_late_starts_as_usual_and_is_else_the_same(tmp_path):
    started = facts_of(start(tmp_path, FACTS, {"NUMBA_A_NEW_ONE": "1"}))
    assert not started["forked"] and started["environ"].pop("NUMBA_A_NEW_ONE")
    assert facts_of(start(tmp_path, FACTS)) == started | {"forked": True}


def test_signals_reach_a_forked_process_and_its_traceback_is_printed(tmp_path):
    with start(tmp_path, "print(flush=True)\nimport signal\nsignal.pause()") as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    with start(tmp_path, "raise ValueError('a reason')") as process:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1 and errors.endswith("ValueError: a reason\n")
