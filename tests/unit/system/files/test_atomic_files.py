"""Files appear complete or not at all, for any failure while they are written."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.system.files.atomic_files import (
    TemporaryFolder,
    atomic_text_file,
    remove_abandoned_folders,
    replace_folder,
    write_atomic,
)


def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    target = write_atomic(tmp_path / "deep" / "summary.json", "old")
    with pytest.raises(RuntimeError, match="half way"), atomic_text_file(target) as file:
        file.write("new")
        raise RuntimeError("half way")
    assert target.read_text() == "old"
    assert [path.name for path in target.parent.iterdir()] == ["summary.json"]


def test_bytes_and_text_are_replaced_atomically_with_usual_permissions(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        path = write_atomic(tmp_path / "picture", b"\x89\xff")
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"\x89\xff" and stat.S_IMODE(path.stat().st_mode) == 0o644
    assert write_atomic(path, "ä").read_text(encoding="utf-8") == "ä"


def test_reader_sees_the_content_of_exactly_one_writer(tmp_path: Path) -> None:
    path, contents = tmp_path / "report.html", ["a" * 100_000, "b" * 100_000]
    writers = [threading.Thread(target=lambda text=text: [write_atomic(path, text) for _ in range(20)]) for text in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not path.exists() or path.read_text() in contents
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_atomic_folder_replaces_the_folder_of_its_name(tmp_path: Path) -> None:
    for name, text in (("step_3", "old"), ("step_3.partial", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    replace_folder(tmp_path / "step_3.partial", tmp_path / "step_3")
    assert (tmp_path / "step_3" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


@pytest.mark.parametrize(
    ("name", "why"), [("/proc/x", "No such file"), ("folder", "Is a directory"), ("file/below", "Not a directory|File exists")]
)
def test_a_file_that_cannot_be_written_is_named_by_its_own_name(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=rf"cannot be written \(({why})") as error:
        write_atomic(tmp_path / name, "text")
    assert error.value.filename == str(tmp_path / name)


def test_temporary_folders_of_killed_processes_are_removed_and_those_of_running_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for left in (f"megatron_rl-sglang-{gone.pid}-a1", f"megatron_rl-other-{gone.pid}-b2"):
        (tmp_path / left / "sockets").mkdir(parents=True)
    others = [tmp_path / name for name in ("megatron_rl-notes", f"other-sglang-{gone.pid}-a1", "megatron_rl-sglang-x-a1")]
    for other in others:
        other.mkdir()
    own = TemporaryFolder("sglang")
    remove_abandoned_folders()
    assert sorted(tmp_path.iterdir()) == sorted([own.path, *others])
    own.remove()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_the_folder_of_a_killed_process_is_removed_with_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "named").touch()
    program = (
        "import os, signal; from megatron_rl.system.files.atomic_files import TemporaryFolder\n"
        f"folder = TemporaryFolder('x', also='rm $(cat \"$1/names\")')\n"
        f"(folder.path / 'names').write_text({str(tmp_path / 'named')!r})\n"
        "print(len(list(folder.path.parent.iterdir())), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "2\n")
    deadline = time.monotonic() + 30
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
