"""``megatron-rl doctor --hang``: runs that hang, and who is named for it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megatron_rl.cli import main
from megatron_rl.rollout.sglang.process.server import free_port
from tests.integration.preloaded import preloading
from tests.integration.torchrun import REPOSITORY

START_S = 120.0


@contextmanager
def hanging(folder: Path) -> Iterator[subprocess.Popen]:
    with preloading():
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.forked_ranks", "3", "tests.integration.hang_worker", str(folder)],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert path.exists()
    time.sleep(0.7)


def diagnosed(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["doctor", "--hang", str(folder)]) == 1
    said = capsys.readouterr().out
    return said


def test_doctor_names_the_process_that_a_hung_run_waits_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_rl.desk.doctor.hang._LONG_S", 0.5)
    monkeypatch.setattr("megatron_rl.desk.doctor.hang._MOVES_S", 0.0)
    monkeypatch.setattr("megatron_rl.desk.doctor.hang._ANSWER_S", 1.0)
    port = free_port("127.0.0.1")
    (tmp_path / "port").write_text(str(port))
    with hanging(tmp_path) as run:
        wait_for(tmp_path / "scores")
        said = diagnosed(tmp_path, capsys)
        assert "rank 0 waits for its servers and reward workers" in said
        assert "ranks 1-2 wait for the driver's next command since " in said
        assert "the driver runs the stage score of step 5 since " in said
        assert f"server http://127.0.0.1:{port}: 3 requests running, 0 waiting" in said
        assert "=> the driver waits for score of step 5, which waits for a reward worker: " in said
        assert "tests.integration.hostile_rewards:score" in said
        assert "scores a response of 10 characters since " in said and "hostile_rewards.py:" in said

        driver, _, late = psutil.Process(run.pid).children()
        (server,) = [child for child in driver.children() if "sglang.launch_server" in child.cmdline()]
        server.suspend()
        said = diagnosed(tmp_path, capsys)
        server.resume()
        assert f"=> server http://127.0.0.1:{port} is stopped (process {server.pid} on " in said

        (tmp_path / "go").touch()
        wait_for(tmp_path / "late")
        said = diagnosed(tmp_path, capsys)
        assert "ranks 0-1 wait in all_reduce, update of the engine policy of the stage policy_update of step 4 since " in said
        assert f"=> ranks 0-1 wait for rank 2 (process {late.pid} on " in said
        assert "which is in look_at_a_file_forever (" in said and "hang_worker.py:" in said

        late.suspend()
        said = diagnosed(tmp_path, capsys)
        late.resume()
        assert f"=> rank 2 is stopped (process {late.pid} on " in said
        assert run.poll() is None  # nobody died of being asked
    assert "has no process left" in diagnosed(tmp_path, capsys)
    (tmp_path / "summary.json").write_text("{}")
    assert main(["doctor", "--hang", str(tmp_path)]) == 0
    assert "has ended" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused_with_a_reason(tmp_path, capsys):
    assert main(["doctor", "--hang", str(tmp_path)]) == 2
    assert "has no processes.json" in capsys.readouterr().err
    assert main(["doctor", "--hang", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    for words, said in (
        (["--mismatch", "a"], "--hang and --mismatch cannot be combined"),
        (["--config", "a.yaml"], "doctor --hang takes the output folder of a run"),
        (["run.seed=2"], "run.seed=2 would change nothing"),
    ):
        assert main(["doctor", "--hang", str(tmp_path), *words]) == 2
        assert said in capsys.readouterr().err
