"""Shared memory of servers: nothing is left once a server is ready, and a server killed before that is cleaned up later."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from megatron_rl.rollout.sglang.process import cleanup
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.system.files.atomic_files import TemporaryFolder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", tmp_path)
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


def test_what_a_server_has_made_is_removed_however_it_is_killed_during_its_start() -> None:
    folder, memory, mark = TemporaryFolder("test", also=cleanup.REMOVE_SHARED_MEMORY), Path("/dev/shm"), uuid.uuid4().hex
    load_file = memory / f"sglang_loads_{mark}.shm"
    text = f"import sys; file = open({str(load_file)!r}, 'w'); print(flush=True); sys.stdin.read()"
    server = subprocess.Popen([sys.executable, "-S", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline()
    (memory / f"sgl_shm_mq_{server.pid}_{mark}").touch()
    cleanup.note_shared_memory([server.pid], folder.path)
    server.kill()
    server.communicate()
    cleanup.note_shared_memory([], folder.path)  # the poll after its death
    folder.remove()
    assert not [path for path in memory.iterdir() if mark in path.name]
