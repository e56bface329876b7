"""Folders that a run or an export writes: unfinished exports of a killed run, and files of others."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.schema import Config
from megatron_rl.errors import UserError
from megatron_rl.run.output import check_output_dir, check_outputs, lock_output_dir

KILLED_WHILE_IT_SAVES = """
import os, sys
from pathlib import Path
from megatron_rl.system.files.atomic_files import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "model.safetensors").write_text("half")
    os.kill(os.getpid(), 9)
"""


def test_locking_the_output_dir_removes_only_unfinished_exports(tmp_path: Path) -> None:
    theirs = [".policy.d", ".policy.backup-1", ".other.abcdefgh", "policies/.step-3.old", "critic/.policy.abcdefgh", "policy"]
    for name in theirs:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".policy.a_file12").write_text("a file")
    (tmp_path / ".lock").touch()  # a run has been here
    before = set(tmp_path.rglob("*"))
    for target in ("policy", "policies/step-12"):
        done = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_SAVES, tmp_path / target], check=False)
        assert done.returncode == -signal.SIGKILL
    assert len(set(tmp_path.rglob("*")) - before) == 4
    config = Config()
    config.run.output_dir = str(tmp_path)
    with lock_output_dir(config) as folder:
        assert set(folder.rglob("*")) - before == set() and before <= set(folder.rglob("*"))


@pytest.mark.parametrize("name", ["policy/model.py", "checkpoints/mine.pt", "config.yaml", "samples/a.wav", "profile/x"])
def test_a_folder_with_other_files_of_a_runs_names_is_refused_even_to_overwrite(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a thesis")
    for overwrite in (False, True):
        config = Config()
        config.run.output_dir, config.run.overwrite = str(tmp_path), overwrite
        with pytest.raises(UserError, match=f"run.output_dir: .* no run wrote .{name.split('/')[0]}"), lock_output_dir(config):
            raise AssertionError
    assert (tmp_path / name).read_text() == "a thesis"


def test_the_working_folder_is_refused_for_a_run_unless_it_is_empty_or_a_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.run.output_dir = "."
    check_output_dir(config)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match=r"run.output_dir: \. has files that no run wrote \(thesis.txt\)"):
        check_output_dir(config)
    (tmp_path / ".lock").touch()
    check_output_dir(config)


@pytest.mark.parametrize("command", ["sft", "dpo", "reward-train", "critic-pretrain"])
def test_an_export_replaces_only_an_empty_folder_or_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    config = Config()

    def check(path: str) -> None:
        getattr(config, command.replace("-", "_")).output_path = path
        check_outputs(config, command)

    for path in ("new", "folder"):
        check(path)
    (folder / "thesis.txt").touch()
    for path in (".", "folder", "..", "outputs", "outputs/run", str(tmp_path)):
        with pytest.raises(UserError, match=f"{command.replace('-', '_')}.output_path: the export replaces"):
            check(path)
    (folder / "model.safetensors").touch()
    (folder / "adapter").mkdir()  # of a policy with adapters
    check("folder")
    (folder / "more").mkdir()
    with pytest.raises(UserError, match="contains adapter, model.safetensors, more"):
        check("folder")


@pytest.mark.parametrize("command", ["label-lines", "select-prompts"])
def test_a_folder_as_the_path_of_a_file_to_write_is_refused_with_its_key(tmp_path: Path, command: str) -> None:
    config, section = Config(), command.replace("-", "_")
    getattr(config, section).output_path = str(tmp_path)
    with pytest.raises(UserError, match=f"{section}.output_path: .* is a folder; give a file"):
        check_outputs(config, command)
