"""Requirements of the GPU stack: a fact has a remedy exactly if something is missing. Commands are faked on PATH."""

import importlib.metadata
import importlib.util
import platform
import shutil
import sysconfig
from pathlib import Path

import pytest

from megatron_rl.system.gpu.gpu_stack import Requirement, machine_facts, package_facts


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put(folder: Path, name: str, output: str, status: int = 0) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{output}'\nexit {status}\n")
    program.chmod(0o755)


def machine(name: str, needed_mib: int = 1) -> Requirement:
    return next(fact for fact in machine_facts("/", needed_mib) if fact.name == name)


def package(name: str) -> Requirement:
    return next(fact for fact in package_facts() if fact.name == name)


@pytest.mark.parametrize(("version", "is_enough"), [("580.65.06", True), ("595.10", True), ("570.172.08", False), ("99.1", False)])
def test_driver_must_support_cuda_13(commands, version, is_enough):
    put(commands, "nvidia-smi", f"{version}\n{version}")
    fact = machine("NVIDIA driver")
    assert fact.found == version
    assert bool(fact.remedy) != is_enough
    assert fact.is_needed


@pytest.mark.parametrize(("output", "status"), [("NVIDIA-SMI has failed", 9), ("No devices were found", 0)])
def test_install_continues_without_a_driver(commands, output, status):
    put(commands, "nvidia-smi", output, status)
    fact = machine("NVIDIA driver")
    assert (fact.found, fact.is_needed) == ("none answers", False)
    assert fact.remedy


@pytest.mark.parametrize(
    ("libc", "is_enough"), [(("glibc", "2.34"), True), (("glibc", "2.100"), True), (("glibc", "2.31"), False), (("", ""), False)]
)
def test_glibc_is_compared_as_numbers(monkeypatch, libc, is_enough):
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    assert bool(machine("glibc").remedy) != is_enough


@pytest.mark.parametrize(("version", "is_enough"), [("12.2.0", True), ("11", True), ("9.4.0", False), ("clang", False)])
def test_compiler_must_be_new_enough(commands, version, is_enough):
    put(commands, "gcc", version)
    put(commands, "g++", version)
    assert bool(machine("C++ compiler").remedy) != is_enough


def test_gcc_and_gpp_must_both_be_installed(commands):
    assert machine("C++ compiler").found == "none"
    put(commands, "g++", "12.2.0")
    assert machine("C++ compiler").found == "none"


def test_python_headers_are_checked(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert machine("headers of Python").found == "none"
    (tmp_path / "Python.h").touch()
    assert machine("headers of Python").remedy == ""


def test_free_disk_is_measured_at_the_nearest_existing_folder(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: (asked.append(place), type("Usage", (), {"free": 5 << 30}))[1])
    (disk,) = [fact for fact in machine_facts(tmp_path / "not" / "yet", 5120) if fact.name == "free disk"]
    assert asked == [tmp_path]
    assert disk.remedy == ""
    assert machine("free disk", 5121).remedy


@pytest.mark.parametrize(
    ("versions", "is_good", "is_needed"),
    [
        (("2.20.2", "2.20.2", "2.20.2"), True, True),
        (("2.20.2", "2.20.2", "2.11.0"), False, True),
        (("2.20.2", None, None), False, True),  # the shell alone
        ((None, None, None), False, False),  # plain PyTorch layers
    ],
)
def test_transformer_engine_is_complete_or_missing(monkeypatch, versions, is_good, is_needed):
    found = dict(zip(("transformer_engine", "transformer_engine_cu13", "transformer_engine_torch"), versions, strict=True))

    def version(name: str) -> str:
        if not found.get(name):
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    fact = package("Transformer Engine")
    assert bool(fact.remedy) != is_good
    assert fact.is_needed is is_needed


@pytest.mark.parametrize(("inside", "is_good"), [("normalization", True), ("lib", False), (None, True)])
def test_apex_that_is_not_nvidias_is_reported(monkeypatch, tmp_path, inside, is_good):
    monkeypatch.syspath_prepend(tmp_path)
    if inside:
        (tmp_path / "apex" / inside).mkdir(parents=True)
        (tmp_path / "apex" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert bool(package("package apex").remedy) != is_good


def test_fused_accumulation_is_detected_without_importing_it(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    assert package("fused gradient accumulation").found == "none"
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("raise SystemError('imported')")
    importlib.invalidate_caches()
    assert package("fused gradient accumulation").found == "present"
