"""Shared memory of servers: nothing is left once a server is ready, and a server killed before that is cleaned up later."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.rollout.sglang.process import cleanup
from megatron_rl.rollout.sglang.process.options import ServerOptions


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cleanup, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_a_ready_servers_message_queues_have_no_name_even_if_it_does_not_report_its_load(memory: Path) -> None:
    for name in ("sgl_shm_mq_41_ab12", "sgl_shm_mq_42_cd34", "sgl_shm_mq_7_00ff"):
        (memory / name).touch()
    cleanup.unlink_shared_memory([41, 42], "http://127.0.0.1:1", ServerOptions("/m", server_args={"dp-size": 2}))
    assert [path.name for path in memory.iterdir()] == ["sgl_shm_mq_7_00ff"]


def test_only_old_memory_of_processes_that_are_gone_is_abandoned(memory: Path) -> None:
    old, gone = cleanup.time.time() - 2 * cleanup._STARTED_S, gone_pid()
    aged = [f"sgl_shm_mq_{gone}_a", f"sgl_shm_mq_{os.getpid()}_c", "other_1_d", "sgl_shm_x_e"]
    names = {**dict.fromkeys(aged, old), f"sgl_shm_mq_{gone}_b": None}
    for name, time_s in names.items():
        (memory / name).touch()
        if time_s is not None:
            os.utime(memory / name, (time_s, time_s))
    cleanup.remove_abandoned_shared_memory()
    assert {path.name for path in memory.iterdir()} == names.keys() - {f"sgl_shm_mq_{gone}_a"}
