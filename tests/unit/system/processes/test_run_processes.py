"""Processes of a run on this machine and on others."""

import fcntl
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_rl.errors import UserError
from megatron_rl.system.processes import run_processes
from megatron_rl.system.processes.run_processes import RankProcess, probe_run, read_members, this_process, write_members

ELSEWHERE = """
import socket, sys, time
socket.gethostname = lambda: "node2"
from pathlib import Path
from megatron_rl.system.processes import process_probe as doing, run_processes as members
members._POLL_S = 0.1
doing.enable_probe("trainer rank 1")
doing.set_status("work", "values of the engine critic")
folder = Path(sys.argv[1])
members.write_members(folder, [members.RankProcess(0, "node1", 1, 0.0), members.this_process(1)])
members.serve_probes(folder)
print("ready", flush=True)
time.sleep(30)
"""


def test_the_first_rank_of_another_machine_answers_and_a_machine_that_does_not_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(run_processes, "_PROBE_TIMEOUT_S", 2.0)
    with subprocess.Popen([sys.executable, "-c", ELSEWHERE, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            trees, silent = probe_run(tmp_path, read_members(tmp_path))
        finally:
            process.kill()
    assert silent == ["node1"]
    (tree,) = trees
    assert tree.member.rank == 1 and tree.member.host == tree.seen[0].host == "node2" and tree.seen[0].pid == process.pid
    assert tree.seen[0].notes["work"][0] == "values of the engine critic" and tree.seen[0].frames
    assert sorted(path.name for path in tmp_path.iterdir()) == ["processes.json"]  # question and answer are gone


def test_reused_pid_counts_as_an_exited_rank(tmp_path):
    own = this_process(0)
    assert own.pid == os.getpid() and own.host == socket.gethostname()
    write_members(tmp_path, [replace(own, started_s=own.started_s - 1000), RankProcess(1, own.host, 2**22 + 1, 0.0)])
    trees, silent = probe_run(tmp_path, read_members(tmp_path))
    assert [tree.seen[0].state for tree in trees] == ["gone", "gone"] and not silent


def test_a_run_that_is_refused_leaves_the_record_of_the_one_that_goes_on(tmp_path):
    write_members(tmp_path, [this_process(0)])
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_members(tmp_path, [])
        assert read_members(tmp_path) == [this_process(0)]
    write_members(tmp_path, [])
    assert read_members(tmp_path) == []


def test_unreadable_process_record_is_a_user_error(tmp_path):
    (tmp_path / "processes.json").write_text('[{"rank": 0}]')
    with pytest.raises(UserError, match="cannot be read"):
        read_members(tmp_path)
