"""What launch/env.sh gives the ranks of a machine."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("num_gpus", "num_cores", "settings", "threads"),
    [
        (8, 64, {}, "8"),
        (8, 224, {}, "8"),
        (8, 32, {}, "4"),
        (8, 4, {}, "1"),
        (8, 16, {"RANKS_PER_NODE": "4"}, "4"),
        (8, 64, {"OMP_NUM_THREADS": "3"}, "3"),
        (0, 64, {}, "1"),  # as the CPU's measurements are
    ],
)
def test_ranks_on_gpus_share_the_cores(
    tmp_path: Path, num_gpus: int, num_cores: int, settings: dict[str, str], threads: str
) -> None:
    for name, lines in (("nvidia-smi", [f"GPU {i}: NVIDIA H100" for i in range(num_gpus)]), ("nproc", [str(num_cores)])):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + ("exit 1\n" if not lines else ""))
        program.chmod(0o755)
    dropped = ("OMP_NUM_THREADS", "RANKS_PER_NODE", "CUDA_VISIBLE_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    script = "set -euo pipefail; source launch/env.sh; echo $OMP_NUM_THREADS"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=REPOSITORY,
        env={**inherited, "PATH": f"{tmp_path}:{os.environ['PATH']}", **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [threads]


@pytest.mark.parametrize(("settings", "prefix"), [({}, ""), ({"PYTHONDONTWRITEBYTECODE": "1", "VENV": "/v"}, "/v/bytecode")])
def test_processes_share_bytecode_in_the_environment_where_python_may_write_none(settings: dict[str, str], prefix: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    script = "set -euo pipefail; source launch/bytecode.sh; echo ${PYTHONDONTWRITEBYTECODE-unset} ${PYTHONPYCACHEPREFIX-}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPOSITORY, env=inherited | settings, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["unset", *filter(None, [prefix])]
