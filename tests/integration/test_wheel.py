"""A wheel on a machine that has nothing else: built from an sdist, installed from the registry, run outside the repository."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from megatron_rl.tracking.metrics_file import MetricsWriter
from tests.unit.desk.watch.stored_samples import write_run

ROOT = Path(__file__).parents[2]
BACKEND = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
UNREACHABLE = ("connection", "timed out", "name resolution", "no matching distribution", "max retries", "error sending request")


def built(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-c", BACKEND, kind, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """(the environment, an empty folder), without PYTHONPATH and torch."""
    folder = tmp_path_factory.mktemp("machine")
    # A copy, because a build writes beside its sources.
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(".*", "tests", "docs", "outputs", "build"))
    sdist = built("build_sdist", folder / "source", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    wheel = built("build_wheel", folder / "unpacked" / sdist.name.removesuffix(".tar.gz"), folder)
    environment = folder / "environment"
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    venv.create(environment, with_pip=uv is None)
    python = environment / "bin" / "python"
    install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    done = subprocess.run([*install, wheel], cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and any(words in done.stderr.lower() for words in UNREACHABLE):
        pytest.skip(f"no registry answers: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    return environment, elsewhere


@pytest.fixture(scope="module")
def said(machine):
    """Runs the wheel's program: (exit status, what it printed)."""
    environment, folder = machine
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def run(*words: object) -> tuple[int, str]:
        command = [environment / "bin" / "megatron-rl", *map(str, words)]
        done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=300, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def examples(machine, said):
    assert said("examples", "files")[0] == 0
    return machine[1] / "files"


def test_what_needs_no_torch_runs_from_the_wheel(said):
    for words, text in (
        (["--help"], "exit statuses"),
        (["--version"], "torch not installed"),
        (["presets"], "T-PPO (arXiv 2506.15050)"),
        (["config", "algorithm.advantage"], "egae"),
    ):
        status, printed = said(*words)
        assert status == 0 and text in printed, (words, printed)


def test_a_layout_is_planned_and_a_run_simulated_from_the_wheel(said, examples):
    model = examples / "examples" / "models" / "qwen2.5-7b"
    status, printed = said("plan", "--model", model, "--gpus", 8, "--slots", 64, "--top", 1, "--windows", 4096)
    assert status == 0 and "plan 1" in printed, printed
    recipe = [examples / "examples" / "gpu" / "tppo.yaml", f"policy.path={model}", "parallel.num_ranks=8"]
    status, printed = said("simulate", *recipe, "--gpu", "H100-80G", "--steps", 2, "--lengths", "uniform:max=900")
    assert status == 0 and "finished responses" in printed, printed


def test_a_run_is_watched_reported_and_browsed_from_the_wheel(said, tmp_path):
    write_run(tmp_path, range(1, 3))
    (tmp_path / "config.yaml").write_text("run: {num_steps: 4}\n")
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.log(1, {"reward/mean": 0.5, "step/time_s": 1.0})
    (tmp_path / "status.json").write_text(json.dumps({"state": "finished", "host": "x", "pid": 1, "started_s": 0.0, "written_s": 1.0}))
    for command, text in {"watch": "step 1/4", "samples": "reward", "report": "report.html"}.items():
        status, printed = said(command, tmp_path)
        assert status == 0 and text in printed, (command, printed)


def test_what_needs_more_says_so_in_one_line(said, examples):
    status, printed = said("train", "--config", examples / "examples" / "gpu" / "tppo.yaml")
    assert status == 2 and "bash DIR/launch/setup.sh" in printed and len(printed.splitlines()) == 1


def test_the_launch_scripts_use_the_environment_of_the_wheel(machine, examples):
    assert not (examples / "launch" / "test.sh").exists()
    assert (examples / ".venv").resolve() == machine[0].resolve()
