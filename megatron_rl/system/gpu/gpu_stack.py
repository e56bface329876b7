"""Requirements of the GPU stack on a machine and its environment: one list for ``launch/setup.sh`` and ``megatron-rl
doctor``.

Standard library only, because ``launch/setup.sh`` runs this file before any package is installed (``python -I
megatron_rl/system/gpu/gpu_stack.py FOLDER NEEDED_MIB``).
"""

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_DRIVER = 580
"""Minimum driver of CUDA 13 (release notes of CUDA 13.0, table 2), with which the wheels of torch, SGLang and
Transformer Engine are built."""
_MIN_GLIBC = (2, 34)  # sglang's wheel is manylinux_2_34
_MIN_GCC = 11  # C++20, which torch's headers need
_TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine_cu13", "transformer_engine_torch")
_COMMAND_TIMEOUT_S = 60.0  # nvidia-smi takes seconds without a persistence daemon


@dataclass(frozen=True)
class Requirement:
    """One requirement of the stack: actual state, required state, and the remedy if they differ."""

    name: str
    found: str
    wanted: str
    remedy: str = ""
    """Remedy; empty if ``found`` is sufficient."""
    is_needed: bool = True
    """True if the stack does not run without it; otherwise ``remedy`` describes what is slower or missing."""


def machine_facts(folder: str | Path, needed_mib: int) -> list[Requirement]:
    """Facts that must hold before packages are installed: driver, glibc, C++ compiler, Python headers, and free MiB on
    the disk of ``folder``. Starts ``nvidia-smi`` and ``c++``."""
    return [_driver(), _glibc(), _compiler(), _python_headers(), _disk(Path(folder), needed_mib)]


def package_facts() -> list[Requirement]:
    """Facts about packages: Transformer Engine, Apex's extension, and an unrelated package ``apex``; imports none of
    them."""
    return [_transformer_engine(), _gradient_fusion(), _apex()]


def _driver() -> Requirement:
    wanted = f"{MIN_DRIVER} or newer (CUDA 13)"
    text = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    versions = re.findall(r"^(\d+)\.[\d.]+$", text or "", re.MULTILINE)
    if not versions:
        remedy = "this machine has no GPU (for example while an image is built); if there should be one, check nvidia-smi"
        return Requirement("NVIDIA driver", "none answers", wanted, remedy, is_needed=False)
    found = text.strip().splitlines()[0] if text else ""
    remedy = f"install driver {MIN_DRIVER} or newer; a container has the driver of its host"
    return Requirement("NVIDIA driver", found, wanted, remedy if int(versions[0]) < MIN_DRIVER else "")


def _glibc() -> Requirement:
    name, version = platform.libc_ver()
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    remedy = "use a newer system (Debian 12, Ubuntu 22.04, RHEL 9 or newer), or the image of the Dockerfile"
    is_enough = name == "glibc" and found >= _MIN_GLIBC
    return Requirement("glibc", f"{name} {version}".strip() or "none", ".".join(map(str, _MIN_GLIBC)), "" if is_enough else remedy)


def _compiler() -> Requirement:
    wanted = f"GCC {_MIN_GCC} or newer, gcc and g++"
    remedy = "install them (Debian, Ubuntu: apt-get install build-essential): Triton and torch.compile call them at run time"
    version = _output(["g++", "-dumpfullversion", "-dumpversion"])
    if version is None or shutil.which("gcc") is None:
        return Requirement("C++ compiler", "none", wanted, remedy)
    number = re.match(r"\d+", version)
    is_enough = number is not None and int(number[0]) >= _MIN_GCC
    return Requirement("C++ compiler", f"GCC {version.strip()}", wanted, "" if is_enough else remedy)


def _python_headers() -> Requirement:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"install the headers of {version} (Debian, Ubuntu: apt-get install {version}-dev): Triton compiles with them at run time"
    found = str(header) if header.exists() else "none"
    return Requirement("headers of Python", found, f"Python.h of {version}", "" if header.exists() else remedy)


def _disk(folder: Path, needed_mib: int) -> Requirement:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free_mib = shutil.disk_usage(existing).free >> 20
    remedy = "" if free_mib >= needed_mib else "free some space, or choose a folder on a larger disk with VENV=/path"
    return Requirement("free disk", f"{free_mib} MiB for {folder}", f"{needed_mib} MiB", remedy)


def _transformer_engine() -> Requirement:
    wanted = "its three packages in one version: " + ", ".join(_TRANSFORMER_ENGINE)
    versions = {name: _version(name) for name in _TRANSFORMER_ENGINE}
    there = {name: version for name, version in versions.items() if version}
    found = ", ".join(f"{name} {version}" for name, version in there.items()) or "none"
    if len(there) == len(versions) and len(set(there.values())) == 1:
        return Requirement("Transformer Engine", found, wanted)
    remedy = (
        "FLAVOR=gpu bash launch/setup.sh builds it after torch; transformer_engine alone has no kernels, and "
        "a build for another torch does not load"
    )
    return Requirement("Transformer Engine", found, wanted, remedy, is_needed=bool(there))


def _gradient_fusion() -> Requirement:
    is_there = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    remedy = "the output layer's gradient is added in a second pass; the image of the Dockerfile has it"
    found = "present" if is_there else "none"
    wanted = "fused_weight_gradient_mlp_cuda of NVIDIA Apex"
    return Requirement("fused gradient accumulation", found, wanted, "" if is_there else remedy, is_needed=False)


def _apex() -> Requirement:
    """PyPI's ``apex`` is a toolkit of a web framework; Megatron takes it for NVIDIA's and fails in its first layer."""
    wanted = "none, or NVIDIA's"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Requirement("package apex", "none", wanted)
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    version = _version("apex") or "of unknown version"
    if any((place / "normalization").is_dir() for place in places):
        return Requirement("package apex", f"NVIDIA Apex {version}", wanted)
    remedy = "pip uninstall apex: this is an unrelated project of the same name, which Megatron would take for NVIDIA's"
    return Requirement("package apex", f"apex {version}, not NVIDIA's", wanted, remedy)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(command: Sequence[str]) -> str | None:
    """Standard output of a command; None if the command is missing, fails or exceeds ``_COMMAND_TIMEOUT_S``."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _main(folder: str, needed_mib: str) -> int:
    """Print one line per requirement, among them ``needed_mib`` free in ``folder``; returns 1 if a needed one is not met."""
    is_bad = False
    for fact in machine_facts(folder, int(needed_mib)):
        if fact.remedy and fact.is_needed:
            is_bad = True
            print(f"setup: error: {fact.name}: {fact.found}, needed: {fact.wanted}\nsetup: remedy: {fact.remedy}", file=sys.stderr)
        else:
            print(f"setup: {fact.name}: {fact.found} (needed: {fact.wanted})" + (f"; {fact.remedy}" if fact.remedy else ""))
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
