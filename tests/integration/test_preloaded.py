"""Processes that the tests fork from a template are those that would have started as usual."""

import json
import os
import signal
import subprocess
import sys

import psutil
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


def start(folder, text, variables=None, *, servers=True, **options):
    (folder / "module.py").write_text(text)
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "SAID": "1"} | (variables or {})
    command = [sys.executable, "-m", "tests.integration.forked_ranks", "1", "module", "-u", "last words"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with preloading(servers=servers):
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


ASKS = """
import os, signal, subprocess, sys
from megatron_rl.rollout.sglang.process.options import ServerOptions, server_environment
from megatron_rl.rollout.sglang.process.server import _DIE_WITH_PARENT
words = ["-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), sys.executable, "-m", "server", "sglang.launch_server"]
env = server_environment(ServerOptions(""), os.environ, [0])
with subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
    print(process.pid, process.stdout.readline().strip(), flush=True)
    print("ended with", process.wait(), flush=True)
"""
SERVER = """
import os, signal, sys
print("tests.integration.preloaded" in sys.modules, os.getsid(0) == os.getpid(), *sys.argv[1:], flush=True)
signal.pause()
"""


@pytest.mark.parametrize("servers", [True, False])
def test_the_server_of_a_forked_process_is_forked_too_and_ends_with_it(tmp_path, servers):
    (tmp_path / "server.py").write_text(SERVER)
    with start(tmp_path, ASKS, servers=servers) as process:
        pid, said = process.stdout.readline().split(maxsplit=1)
        assert said.split() == [str(servers), "True", "sglang.launch_server"], process.stderr.read()
        os.kill(int(pid), signal.SIGUSR1)
        assert process.stdout.readline() == f"ended with {-signal.SIGUSR1}\n"
    with start(tmp_path, ASKS, servers=servers) as process:
        server = psutil.Process(int(process.stdout.readline().split()[0]))
        process.kill()
    assert not psutil.wait_procs([server], timeout=60)[1]
