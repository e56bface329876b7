"""The Dockerfile agrees with the requirements and the scripts, and keeps hadolint's rules where hadolint is not at hand."""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatron_rl.system.gpu.gpu_environment import NCCL_DEFAULTS

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str, str]]:
    """(stage, instruction, argument) in their order, lines joined, comments left out."""
    text = re.sub(r"(?m)^\s*#.*\n", "", TEXT).replace("\\\n", " ")
    stage, found = "", []
    for line in filter(str.strip, text.splitlines()):
        word, argument = line.split(maxsplit=1)
        if word == "FROM":
            stage = argument.split()[-1]
        found.append((stage, word, " ".join(argument.split())))
    return found


INSTRUCTIONS = instructions()
PARENT = {stage: argument.split()[0] for stage, word, argument in INSTRUCTIONS if word == "FROM"}


def lineage(stage: str) -> list[str]:
    """The stage and those it is made from, the last first."""
    return [stage, *lineage(PARENT[stage])] if stage in PARENT else []


def arguments(word: str, *stages: str) -> list[str]:
    return [argument for stage, found, argument in INSTRUCTIONS if found == word and stage in stages]


def environment(stage: str) -> dict[str, str]:
    pairs = " ".join(argument for one in reversed(lineage(stage)) for argument in arguments("ENV", one))
    return dict(pair.split("=", 1) for pair in pairs.split())


def copied(stage: str) -> list[str]:
    """Paths of the repository that a stage's COPY takes."""
    return [path for argument in arguments("COPY", stage) if "--" not in argument for path in argument.split()[:-1]]


def test_debian_is_pinned_by_its_digest_and_apex_by_its_commit():
    (debian,) = re.findall(r"^ARG DEBIAN=(.*)$", TEXT, re.MULTILINE)
    assert re.fullmatch(r"debian:\d+\.\d+-slim@sha256:[0-9a-f]{64}", debian)
    assert re.search(r"^ARG APEX_COMMIT=[0-9a-f]{40}$", TEXT, re.MULTILINE)
    assert PARENT["base"] == "${DEBIAN}"
    assert all(parent in PARENT or parent == "${DEBIAN}" for parent in PARENT.values())


def test_no_package_is_installed_but_by_setup_sh_and_apexs_wheel_and_uv_that_fetches_python():
    pips = re.findall(r"\bpip\d? install\b[^\n\\]*", TEXT)
    assert [pip.strip() for pip in pips] == ["pip install --no-cache-dir -r requirements/uv.txt", "pip install --no-deps /src/wheels/*.whl"]
    assert "requirements/uv.txt" in copied("python")
    for stage, flavor in (("cpu-packages", "cpu"), ("gpu-packages", "gpu")):
        assert any(re.search(rf"FLAVOR={flavor} bash launch/setup\.sh$", run) for run in arguments("RUN", stage))


def test_the_packages_depend_on_their_pins_alone(tmp_path):
    """The stage copies what setup.sh reads, so that a change of code does not install again; and this is enough to import."""
    paths = copied("pins")
    read = {"pyproject.toml", "setup.py", "README.md", "requirements", "launch/setup.sh", "launch/pip_settings.py"}
    assert {"launch/torchvision_without_cuda.pth", "megatron_rl/system/gpu/gpu_stack.py"} <= set(paths)
    assert read <= set(paths)
    code = [path for path in paths if path.endswith(".py") and path.startswith("megatron_rl/")]
    assert len(code) < 6
    for path in code:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    subprocess.run([sys.executable, "-S", "-c", "import megatron_rl"], cwd=tmp_path, check=True)


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_an_image_has_one_venv_and_runs_as_nobody_special(stage):
    assert environment(stage)["PATH"].startswith("/opt/venv/bin:")
    assert f"--from={stage}-packages /opt/venv /opt/venv" in arguments("COPY", stage)
    assert "ln -s /opt/venv .venv" in arguments("RUN", stage)
    assert not any(re.search(r"-m venv|virtualenv|setup\.sh", run) for run in arguments("RUN", *lineage(stage)))
    (user,) = arguments("USER", stage)
    assert user == "1000" and any(f"--uid {user}" in run for run in arguments("RUN", "base"))
    assert "--chown=trainer:trainer . ." in arguments("COPY", stage)


def test_the_last_layers_are_the_small_ones():
    """Code comes after packages, and no layer of packages is made in the image's own stage."""
    for stage in ("cpu", "gpu"):
        copies = [argument for one, word, argument in INSTRUCTIONS if one == stage and word == "COPY"]
        assert copies[-1] == "--chown=trainer:trainer . ."
        assert not any("setup.sh" in run or "pip" in run for run in arguments("RUN", stage))
    parts = re.search(r"for part in (.*); do", TEXT)[1].split()
    taken = [argument for argument in arguments("COPY", "gpu") if "/layers/" in argument]
    assert [argument.split()[0] for argument in taken] == ["--from=gpu-packages"] * len(parts)
    assert [argument.split()[1] for argument in taken] == [f"/layers/{part}" for part in parts]


def test_nccls_variables_are_left_to_the_trainer_so_that_one_of_them_sets_both():
    found = environment("gpu")
    assert not NCCL_DEFAULTS.keys() & found.keys()
    assert found["MEGATRON_RL_REQUIRE_GPU"] == "1"
    assert not any("NCCL_" in run for run in arguments("RUN", "gpu", "gpu-packages"))


def test_the_compiler_is_where_setup_sh_completes_it():
    version = re.search(r"uv python install (3\.\d+)\.\d+$", TEXT, re.MULTILINE)[1]
    toolkit = f"/opt/venv/lib/python{version}/site-packages/nvidia/cu13"
    assert environment("gpu")["CUDA_HOME"] == toolkit
    assert set(re.findall(r"/opt/venv/lib/python([\d.]+)/", TEXT)) == {version}
    assert "site-packages/nvidia/cu13" in (ROOT / "launch" / "setup.sh").read_text()
    assert "python3.11-dev" in TEXT and "build-essential" in TEXT


def test_the_image_for_gpus_has_its_python_where_its_environment_was_made():
    (made,) = [run for run in arguments("RUN", "gpu-packages") if "setup.sh" in run]
    assert made.startswith("UV_PYTHON_INSTALL_DIR=/opt/python PYTHON=3.12 ")
    for stage in ("gpu-packages", "gpu"):
        assert "--from=python /opt/python /opt/python" in arguments("COPY", stage)
    assert environment("python")["UV_PYTHON_INSTALL_DIR"] == "/opt/python"


def test_apt_leaves_no_lists_and_recommends_nothing():
    for run in arguments("RUN", *PARENT):
        if "apt-get" in run:
            assert "apt-get update && apt-get install -y --no-install-recommends" in run
            assert run.count("rm -rf /var/lib/apt/lists/*") == 1


def test_files_that_git_ignores_stay_out_of_the_image():
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    for name in [*ignored, ".git"]:
        assert any(fnmatch(name, pattern.removeprefix("**/")) for pattern in patterns), name
    kept = [path.name for path in ROOT.iterdir() if not any(fnmatch(path.name, name) for name in (*ignored, ".git"))]
    assert {"Dockerfile", ".dockerignore", ".gitignore", ".importlinter", "CITATION.cff", "tests"} <= set(kept)
    for name in kept:  # the tests read them
        assert not any(fnmatch(name, pattern.removeprefix("**/")) for pattern in patterns), name


HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: bash launch/setup.sh")
def test_hadolint_has_nothing_to_say():
    done = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolints_exceptions_have_a_reason():
    lines = TEXT.splitlines()
    rules = {rule for line in lines if "hadolint ignore=" in line for rule in line.split("=")[1].split(",")}
    assert rules == {"DL3008"}
    assert "Without versions: " in TEXT
