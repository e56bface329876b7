"""launch/setup.sh with every command faked: what it checks before it downloads, and what it installs in which order."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COPIED = (
    "launch/setup.sh",
    "launch/pip_settings.py",
    "launch/torchvision_without_cuda.pth",
    "pyproject.toml",
    "setup.py",
    "requirements",
    "megatron_rl/system/gpu/gpu_stack.py",
)

VERSION = "{}.{}".format(*sys.version_info)
OTHER = "3.12" if VERSION == "3.11" else "3.11"
PYTHON = """#!/bin/sh
case "$*" in *"print(*sys.version_info"*) echo VERSION; exit 0 ;; esac
# A Python that makes environments without anything in them, and notes what is asked of theirs.
if [ "$1" = -m ] && [ "$2" = venv ]; then
    mkdir -p "$3/bin" "$3/lib/python3.11/site-packages/nvidia/cu13/lib"
    touch "$3/lib/python3.11/site-packages/nvidia/cu13/lib/libcudart.so.13"
    cp "$STUBS/venv_python" "$3/bin/python"
    cp "$STUBS/venv_python" "$3/bin/megatron-rl"
    exit 0
fi
exec REAL "$@"
""".replace("REAL", sys.executable)
VENV_PYTHON = """#!/bin/sh
case "$*" in *find_spec*) exit ${LACKS:-0} ;; *version_info*) exec REAL "$@" ;; esac
[ "$1" = -c ] && exit 0
case "$1" in --version | -I | launch/*) exec REAL "$@" ;; esac
case "$*" in *"-r requirements/uv.txt") exit 1 ;; esac  # the registry has no uv, but in tests of uv itself
case "$*" in *--dry-run*) echo "Would install torch-2.13.0${BUILD-+cpu} torchvision-0.28.0${BUILD-+cpu}" ;; esac
printf '%s|%s|%s\\n' "$*" "$NVTE_PYTORCH_FORCE_BUILD" "$CUDA_HOME" >>"$CALLS"
case "$*" in
    *"${FAILS:-nothing fails}"*) echo "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."; exit 1 ;;
esac
""".replace("REAL", sys.executable)


@pytest.fixture
def machine(tmp_path: Path):
    """Runs setup.sh in a copy of what it reads; ``machine.calls()`` are the calls of the environment's Python."""
    return Machine(tmp_path)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "repository", folder / "bin"
        for path in COPIED:
            copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / path, self.folder / path)
        (self.folder / "launch" / "te_python.sh").write_text('echo "te_python $1" >>"$CALLS"\n')
        self.bin.mkdir()
        self.python(VERSION)
        self.command("venv_python", VENV_PYTHON)
        for name in ("gcc", "g++"):
            self.command(name, "#!/bin/sh\necho 12.2.0\n")
        self.command("df", "#!/bin/sh\necho head\necho / 1 1 ${FREE_MIB:-999999} 1 /\n")
        for name in "bash sh cat cut sha256sum awk grep tail dirname mkdir touch cp ln rm nproc env echo".split():
            (self.bin / name).symlink_to(shutil.which(name))

    def command(self, name: str, text: str) -> Path:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)
        return self.bin / name

    def python(self, version: str, name: str = "") -> Path:
        return self.command(name or f"python{version}", PYTHON.replace("VERSION", version))

    def driver(self, version: str | None) -> None:
        """``nvidia-smi`` of a GPU with this driver, or of none."""
        answer = f'[ "$1" = -L ] && echo "GPU 0: H100" || echo {version}' if version else "exit 9"
        self.command("nvidia-smi", f"#!/bin/sh\n{answer}\n")

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = {"PATH": str(self.bin), "STUBS": str(self.bin), "CALLS": str(self.folder / "calls")}
        home = {"HOME": str(self.folder), "TORCH_CPU_INDEX": ""}
        return subprocess.run(
            ["bash", "launch/setup.sh"], cwd=self.folder, env=home | paths | environment, capture_output=True, text=True, timeout=60
        )

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


def enough_disk(machine: Machine) -> None:
    """The GPU's figure is measured, not faked: tests run on small disks too."""
    script = machine.folder / "launch" / "setup.sh"
    script.write_text(script.read_text().replace("NEEDED_MIB=18000", "NEEDED_MIB=1"))


def test_a_gpu_machine_gets_the_lock_then_transformer_engine_then_the_package(machine):
    machine.driver("580.65.06")
    enough_disk(machine)
    done = machine.run()
    assert done.returncode == 0, done.stderr
    locked, compiled, package = machine.calls()
    assert "install --disable-pip-version-check --no-deps --require-hashes -r requirements/gpu.lock|" in locked
    assert "--no-deps --no-build-isolation --require-hashes -r requirements/gpu-build.lock" in compiled
    _, forced, toolkit = compiled.split("|")
    assert forced == "TRUE"
    assert package.split("|")[0].endswith("--no-deps --no-build-isolation -e .")
    # A toolkit that programs can be linked with.
    assert Path(toolkit).is_absolute()
    assert os.readlink(f"{toolkit}/lib64") == "lib" and os.readlink(f"{toolkit}/lib/libcudart.so") == "libcudart.so.13"
    for name in ("NVIDIA driver: 580.65.06", "glibc: ", "C++ compiler: GCC 12.2.0", "headers of Python: ", "free disk: "):
        assert f"setup: {name}" in done.stdout


def test_nothing_is_done_twice_and_a_new_lock_compiles_only_for_a_new_torch(machine):
    machine.driver("580.65.06")
    enough_disk(machine)
    machine.run()
    assert machine.run().stdout == "setup: .venv is up to date\n"
    assert len(machine.calls()) == 3
    lock = machine.folder / "requirements" / "gpu.lock"
    lock.write_text(lock.read_text().replace("numpy==", "numpy==9"))
    machine.run()
    assert ["gpu-build" in call for call in machine.calls()[3:]] == [False, False]
    lock.write_text(lock.read_text().replace("torch==2", "torch==3"))
    machine.run()
    assert ["gpu-build" in call for call in machine.calls()[5:]] == [False, True, False]


def test_an_old_driver_is_refused_before_anything_is_downloaded(machine):
    machine.driver("550.54.15")
    enough_disk(machine)
    done = machine.run()
    assert done.returncode == 1 and machine.calls() == []
    assert "NVIDIA driver: 550.54.15, needed: 580" in done.stderr and "remedy: install driver 580" in done.stderr


def test_a_small_disk_is_refused_with_both_numbers(machine):
    machine.driver("580.65.06")
    script = machine.folder / "launch" / "setup.sh"
    script.write_text(script.read_text().replace("NEEDED_MIB=18000", "NEEDED_MIB=99000000"))
    done = machine.run()
    assert done.returncode == 1 and machine.calls() == []
    assert "needed: 99000000 MiB" in done.stderr
    cpu = machine.run(FLAVOR="cpu", FREE_MIB="5999")
    assert cpu.returncode == 1 and "5999 MiB free" in cpu.stderr and "6000 needed" in cpu.stderr


def test_a_missing_compiler_is_refused(machine):
    machine.driver("580.65.06")
    enough_disk(machine)
    (machine.bin / "g++").unlink()
    done = machine.run()
    assert done.returncode == 1 and machine.calls() == []
    assert "C++ compiler: none" in done.stderr and "build-essential" in done.stderr


def test_an_image_is_built_where_no_driver_is(machine):
    enough_disk(machine)
    done = machine.run(FLAVOR="gpu")
    assert done.returncode == 0, done.stderr
    assert "NVIDIA driver: none answers" in done.stdout
    assert len(machine.calls()) == 3


def test_a_cpu_machine_gets_its_pins_and_sglang_without_its_own(machine):
    done = machine.run()
    assert done.returncode == 0, done.stderr
    calls = [call.split("|")[0] for call in machine.calls()]
    stand_ins = next(call for call in calls if call.startswith("te_python"))
    locked, planned, torch, package = (call for call in calls if call != stand_ins)
    assert stand_ins == "te_python .venv"
    assert locked.endswith("install --disable-pip-version-check --no-deps --require-hashes -r requirements/cpu.lock")
    assert planned.endswith("--dry-run --no-deps torch==2.13.0 torchvision==0.28.0") and torch.endswith("torch==2.13.0 torchvision==0.28.0")
    assert "uv could not be installed, so pip installs" in done.stdout
    assert package.endswith("-e .")


def test_a_cuda_build_on_a_cpu_machine_is_told_before_its_download_and_needs_more_room(machine):
    done = machine.run(BUILD="", FREE_MIB="9999")
    assert done.returncode == 1 and "only CUDA builds of them: 2.6 GB to download, 6.6 GB installed" in done.stdout
    assert "9999 MiB free" in done.stderr and "10000 needed" in done.stderr
    assert not any("install --disable-pip-version-check torch==" in call for call in machine.calls())
    assert machine.run(BUILD="").returncode == 0


def test_uv_installs_where_it_is_with_the_registries_of_pip(machine):
    planned = "torch==2.13.0+cpu torchvision==0.28.0+cpu"
    machine.command("uv", f'#!/bin/sh\necho "uv $* $UV_FIND_LINKS $UV_INDEX_STRATEGY" >>"$CALLS"\necho {planned}\n')
    done = machine.run(PIP_FIND_LINKS="/wheels")
    assert done.returncode == 0, done.stderr
    calls = [call for call in machine.calls() if call.startswith("uv ")]
    assert len(calls) == 4 and all("--python .venv/bin/python" in call and call.endswith("unsafe-best-match") for call in calls)
    assert "--no-deps --require-hashes -r requirements/cpu.lock" in calls[0] and "--no-build-isolation -e ." in calls[-1]


def test_pips_settings_are_uvs(tmp_path):
    settings = ["global.find-links='/a\\n/b'", ":env:.extra-index-url='https://one https://two'", "global.extra-index-url='file:///three'"]
    text = "\n".join([*settings, "freeze.timeout='10'", "install.no-index='1'"])
    command = [sys.executable, str(ROOT / "launch" / "pip_settings.py")]
    done = subprocess.run(command, input=text, env={"UV_NO_INDEX": "0"}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "export UV_INDEX_STRATEGY=unsafe-best-match",
        "export UV_FIND_LINKS=/a,/b",
        "export UV_INDEX='https://one https://two'",
    ]


def test_a_python_of_pyenv_or_uv_is_found_where_the_one_on_path_does_not_run(machine):
    (machine.bin / f"python{VERSION}").unlink()
    refused = machine.run()
    assert refused.returncode == 1 and "no Python 3.11 or 3.12 found on PATH, in pyenv or in uv" in refused.stderr
    assert "uv python install 3.12" in refused.stderr
    for version in ("3.11", "3.12"):
        machine.command(f"python{version}", "#!/bin/sh\necho 'pyenv: command not found' >&2; exit 127\n")
    for folder in (".pyenv/versions/3.12.1", ".local/share/uv/python/cpython-3.11.9-linux-x86_64-gnu"):
        place = machine.folder / folder / "bin"
        place.mkdir(parents=True)
        machine.python("3.12" if "3.12" in folder else "3.11", "found").rename(place / "python")
        done = machine.run()
        assert done.returncode == 0, done.stderr
        shutil.rmtree(machine.folder / folder.split("/")[0])
        shutil.rmtree(machine.folder / ".venv")


def test_gpus_get_python_3_12_cpus_3_11_and_both_what_is_asked_for(machine):
    enough_disk(machine)
    for name in ("3.11", "3.12"):  # the one that is taken makes an environment and says so
        text = PYTHON.replace("VERSION", name).replace("exit 0\nfi", f'echo "made by {name}" >&2; exit 0\nfi')
        machine.command(f"python{name}", text)
    for environment, version in (({}, "3.11"), ({"FLAVOR": "gpu"}, "3.12"), ({"PYTHON": "3.12"}, "3.12"), ({"PYTHON": "3.11"}, "3.11")):
        done = machine.run(**environment)
        assert done.returncode == 0 and f"made by {version}" in done.stderr, done.stderr
        assert ("Megatron Core 0.16 is the newest for Python 3.11" in done.stdout) is (version == "3.11")
        shutil.rmtree(machine.folder / ".venv")
    assert "no Python 3.13 found" in machine.run(PYTHON="3.13").stderr


def test_uv_fetches_a_python_where_there_is_none(machine):
    stub = machine.python(VERSION).rename(machine.folder / "fetched")
    place = machine.folder / f".local/share/uv/python/cpython-{VERSION}.1-linux-x86_64-gnu/bin"
    fetch = f'"python install {VERSION}") mkdir -p {place}; cp {stub} {place}/python ;;'
    machine.command("uv", f'#!/bin/sh\ncase "$*" in {fetch} "python "*) exit 1 ;; esac\necho torch-2.13.0+cpu torchvision-0.28.0+cpu\n')
    assert "uv fetches" in machine.run(PYTHON=OTHER).stdout and machine.calls() == []
    done = machine.run(PYTHON=VERSION)
    assert done.returncode == 0, done.stderr


def test_the_folder_of_written_examples_completes_the_environment_of_the_wheel(machine):
    for name in ("setup.py", "pyproject.toml"):
        (machine.folder / name).unlink()
    (machine.folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(machine.bin / "venv_python", machine.folder / ".venv" / "bin" / "python")
    done = machine.run()
    assert done.returncode == 0 and "has all that it needs" in done.stdout and machine.calls() == []
    done = machine.run(LACKS="1")
    assert done.returncode == 0, done.stderr
    locked, planned, torch = [call for call in machine.calls() if "uv.txt" not in call]
    assert "requirements/cpu.lock" in locked and "--dry-run" in planned and "torch==2.13.0" in torch


def test_an_environment_keeps_its_python_and_another_one_is_refused(machine):
    assert machine.run().returncode == 0
    machine.python(OTHER, "other")
    machine.command(f"python{VERSION}", "#!/bin/sh\nexit 1\n")
    assert "up to date" in machine.run().stdout and "up to date" in machine.run(PYTHON=VERSION).stdout
    for asked in ("other", OTHER):
        done = machine.run(PYTHON=asked)
        assert done.returncode == 1 and f"PYTHON={asked} is {OTHER}" in done.stderr and "rm -rf .venv" in done.stderr


def test_a_driver_that_does_not_answer_is_told_and_not_taken_for_a_cpu_machine_in_silence(machine):
    machine.driver(None)
    done = machine.run()
    assert "lists no GPU" in done.stdout and "FLAVOR=gpu" in done.stdout
    assert any("requirements/cpu.lock" in call for call in machine.calls())


def test_without_transformer_engine_the_missing_package_is_reported(machine):
    machine.driver("580.65.06")
    enough_disk(machine)
    done = machine.run(TRANSFORMER_ENGINE="no")
    assert done.returncode == 0, done.stderr
    assert "without Transformer Engine" in done.stdout
    assert not any("gpu-build" in call for call in machine.calls())
    assert any("uninstall -y transformer_engine transformer_engine_cu13 transformer_engine_torch" in call for call in machine.calls())


@pytest.mark.parametrize(("fails", "error"), [("gpu-build.lock", "differs from the locked one"), ("gpu.lock", "locked")])
def test_a_failed_part_is_reported_with_its_log_and_can_run_again(machine, fails, error):
    machine.driver("580.65.06")
    enough_disk(machine)
    done = machine.run(FAILS=fails)
    assert done.returncode == 1
    assert error in done.stderr and "install.log" in done.stderr
    assert machine.run().returncode == 0
    assert "gpu-build.lock" in machine.calls()[-2]


def test_an_unknown_flavor_is_refused(machine):
    done = machine.run(FLAVOR="tpu")
    assert done.returncode == 1 and "FLAVOR=cpu or FLAVOR=gpu" in done.stderr
