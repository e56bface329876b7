"""examples/pairwise_ppo/judge.sh: whatever ends the script, the server that it started ends too."""

import os
import signal
import subprocess
import time

import pytest

from tests.unit.examples.test_examples import ROOT

DEADLINE_S = 20.0
SERVER = """#!/usr/bin/env bash
echo $$ >server.pid
{before}
echo "server http://127.0.0.1:4711 is ready (model $3, log x); Ctrl-C stops it"
trap 'touch stopped; exit 0' TERM
while true; do sleep 0.05; done
"""


def start(folder, body, *, before=""):
    """A script with ``body`` that has sourced judge.sh, beside a server that does as `megatron-rl serve` does."""
    command = folder / ".venv" / "bin" / "megatron-rl"
    command.parent.mkdir(parents=True)
    command.write_text(SERVER.format(before=before))
    command.chmod(0o755)
    script = f"set -euo pipefail\n. {ROOT}/examples/pairwise_ppo/judge.sh\n{body}\n"
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell cannot trap what was ignored when it started, as SIGINT is in a test run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def runs(pid_file):
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("body", "status"), [("true", 0), ("attended false", 1), ("attended bash -c 'exit 7'", 7)])
def test_the_server_ends_with_the_script_whose_status_stays(tmp_path, body, status):
    script = start(tmp_path, f'start_judge\necho "url $JUDGE_URL"\n{body}')
    output, _ = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == status, output
    assert "url http://127.0.0.1:4711" in output
    assert (tmp_path / "stopped").exists() and not runs(tmp_path / "server.pid")
    assert not list(tmp_path.glob("tmp.*"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_under_way_and_the_server_at_once(tmp_path, number, status):
    script = start(tmp_path, "start_judge\nattended bash -c 'echo $$ >command.pid; exec sleep 600'")
    command = tmp_path / "command.pid"
    wait_for(lambda: command.exists() and command.read_text().strip(), "the command did not start")
    script.send_signal(number)
    output, _ = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == status, output
    assert (tmp_path / "stopped").exists() and not runs(tmp_path / "server.pid") and not runs(command)


def test_a_signal_while_the_server_starts_ends_it(tmp_path):
    script = start(tmp_path, "start_judge", before="trap 'exit 0' TERM\nwhile true; do sleep 0.05; done")
    wait_for((tmp_path / "server.pid").exists, "the server did not start")
    script.send_signal(signal.SIGTERM)
    script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 143 and not runs(tmp_path / "server.pid")


def test_judge_script_reports_a_server_that_fails_to_start(tmp_path):
    script = start(tmp_path, "start_judge\necho not reached", before="echo 'no memory'\nexit 3")
    output, _ = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 1
    assert "ended before it was ready" in output and "no memory" in output and "not reached" not in output
