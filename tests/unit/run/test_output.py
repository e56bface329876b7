"""A run's folder: unfinished exports of a killed run."""

import signal
import subprocess
import sys
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.run.output import lock_output_dir

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
    before = set(tmp_path.rglob("*"))
    for target in ("policy", "policies/step-12"):
        done = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_SAVES, tmp_path / target], check=False)
        assert done.returncode == -signal.SIGKILL
    assert len(set(tmp_path.rglob("*")) - before) == 4
    config = Config()
    config.run.output_dir = str(tmp_path)
    with lock_output_dir(config) as folder:
        assert set(folder.rglob("*")) - before == {tmp_path / ".lock"} and before <= set(folder.rglob("*"))
