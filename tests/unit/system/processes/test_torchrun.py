"""The launcher reports ranks that died before they could report."""

import os
import signal
import subprocess
import sys

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_rl.system.processes.torchrun import run_under_torchrun


@pytest.mark.parametrize(("exit_code", "status"), [(-9, 1), (-6, 1), (2, 2)])
def test_a_killed_rank_is_named_and_one_that_failed_has_spoken_for_itself(monkeypatch, capsys, exit_code, status):
    def fail(arguments):
        failure = ProcessFailure(local_rank=3, pid=1, exitcode=exit_code, error_file="")
        raise ChildFailedError("megatron_rl", {3: failure})

    monkeypatch.setattr(torchrun, "main", fail)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_under_torchrun(4, ["train"]) == status
    said = capsys.readouterr().err
    assert ("trainer rank 3 was killed by signal" in said) == (exit_code < 0)
    assert ("dmesg" in said) == (exit_code == -9)


def test_torchrun_does_not_warn_about_the_options_that_it_is_given(monkeypatch, caplog):
    monkeypatch.setattr(torchrun, "main", lambda words: torchrun.config_from_args(torchrun.parse_args(words)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_under_torchrun(2, ["train"]) == 0
    assert caplog.messages == []


def test_a_launcher_that_is_killed_leaves_no_temporary_file(tmp_path):
    rank = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    options = ["--standalone", "--nproc-per-node", "1", "--no-python", sys.executable, "-c", rank]
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"from megatron_rl.system.processes.torchrun import launch; launch({options})"],
        env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    rank_pid = int(launcher.stdout.readline())
    for pid in (launcher.pid, rank_pid):
        os.kill(pid, signal.SIGKILL)
    launcher.communicate()
    assert list(tmp_path.iterdir()) == []
