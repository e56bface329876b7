"""The locks are what the pins were resolved to: every pin is in, with hashes, for both Pythons. Nothing is fetched."""

import re

import pytest

from megatron_rl.system.megatron_core import RELEASES
from tools import lock

TEXTS = {name: (lock.ROOT / "requirements" / name).read_text() for name in lock.SOURCES}


@pytest.mark.parametrize("name", lock.SOURCES)
def test_a_lock_was_made_from_the_pins_as_they_are(name):
    digest = lock.digest(lock.all_pins(name))
    assert f"# pins: {digest}\n" in TEXTS[name], f"requirements/{name} is older than its pins: python tools/lock.py"


@pytest.mark.parametrize("name", lock.SOURCES)
@pytest.mark.parametrize("python", lock.PYTHONS)
def test_every_pin_is_in_its_lock(name, python):
    versions = {package: version for package, version, marker, _ in lock.locked(TEXTS[name]) if marker in ("", python)}
    pins = lock.read_pins(lock.SOURCES[name], python=python)
    assert {package for package in pins if name == "cpu.lock" and lock.TORCH.match(package)} in (set(), {"torch", "torchvision"})
    assert {item for item in pins.items() if name != "cpu.lock" or not lock.TORCH.match(item[0])} <= set(versions.items())


@pytest.mark.parametrize("name", lock.SOURCES)
def test_every_line_of_a_lock_has_hashes_and_both_pythons_have_the_same_packages(name):
    packages: dict[str, set[str]] = {python: set() for python in lock.PYTHONS}
    for package, version, marker, hashes in lock.locked(TEXTS[name]):
        assert package == lock.canonical(package) and version
        assert hashes and all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes)
        for python in [marker] if marker else lock.PYTHONS:
            assert package not in packages[python]
            packages[python].add(package)
    assert packages["3.11"] == packages["3.12"]


def test_the_lock_of_a_cpu_machine_leaves_the_build_of_torch_open_and_has_sglang_without_its_cuda():
    locked = {package for package, *_ in lock.locked(TEXTS["cpu.lock"])}
    assert {package for package in locked if lock.TORCH.match(package)} == set()
    assert "sglang" in locked and not {package for package in locked if "flashinfer" in package or package.startswith("sgl-")}


def test_compiled_packages_are_not_installed_first():
    installed = {package for package, *_ in lock.locked(TEXTS["gpu.lock"])}
    compiled = lock.read_pins(["gpu-build.txt"])
    assert not installed & compiled.keys()
    assert {"torch", "transformer-engine", "transformer-engine-cu13", "nvidia-cuda-nvcc"} <= installed
    assert "apex" not in installed


def test_transformer_engine_has_one_version_and_the_compiler_is_of_torchs_cuda():
    versions = {package: version for package, version, *_ in lock.locked(TEXTS["gpu.lock"] + TEXTS["gpu-build.lock"])}
    assert len({version for package, version in versions.items() if package.startswith("transformer-engine")}) == 1
    for package in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"):
        assert versions[package].rsplit(".", 1)[0] == versions["cuda-toolkit"].rsplit(".", 2)[0]


def test_cpu_and_gpu_machines_have_the_same_sglang():
    assert lock.read_pins(["sglang.txt"])["sglang"] == lock.read_pins(["gpu.txt"])["sglang"]


def test_comments_and_order_of_the_pins_do_not_make_a_lock_old(tmp_path):
    (tmp_path / "one.txt").write_text("# why\n-r two.txt\nNumpy==1.0  # because\n")
    (tmp_path / "two.txt").write_text("a_b==2\n")
    pins = lock.read_pins(["one.txt"], tmp_path)
    assert pins == {"numpy": "1.0", "a-b": "2"}
    assert lock.digest(pins.items()) == lock.digest([("a-b", "2"), ("numpy", "1.0")])
    assert lock.digest(pins.items()) != lock.digest([("a-b", "3"), ("numpy", "1.0")]) != lock.digest([("a-b", "3")])


def test_a_pin_of_one_python_holds_for_it_alone(tmp_path):
    (tmp_path / "one.txt").write_text('same==1\na==1 ; python_version == "3.11"  # why\na==2 ; python_version == "3.12"\n')
    assert [lock.read_pins(["one.txt"], tmp_path, python)["a"] for python in lock.PYTHONS] == ["1", "2"]
    assert lock.read_pins(["one.txt"], tmp_path)["same"] == "1"


def test_each_python_gets_the_release_of_megatron_that_the_trainer_knows():
    pins = {python: lock.read_pins(["common.txt"], python=python)["megatron-core"] for python in lock.PYTHONS}
    assert {pin.rpartition(".")[0]: python for python, pin in pins.items()} == RELEASES


def test_a_lock_reads_back_as_what_was_resolved():
    resolved = {
        "3.11": {"same": ("1", frozenset({"a", "b"})), "other": ("1", frozenset({"c"}))},
        "3.12": {"same": ("1", frozenset({"d"})), "other": ("2", frozenset({"e"})), "late": ("3", frozenset({"f"}))},
    }
    text = lock.lock_text(resolved, "2026-01-01", [("same", "1")])
    assert list(lock.locked(text)) == [
        ("late", "3", "3.12", ["f"]),
        ("other", "1", "3.11", ["c"]),
        ("other", "2", "3.12", ["e"]),
        ("same", "1", "", ["a", "b", "d"]),
    ]


def test_a_lock_names_the_time_at_which_it_was_made():
    """A day is not enough: the registry may get a package later on that day."""
    for text in TEXTS.values():
        assert re.search(r" as of \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", text)
    with pytest.raises(SystemExit):
        lock.main(["--check", "--as-of", "2026-11-22"])


def test_gpu_and_cpu_machines_have_the_same_trackers():
    pins = lock.read_pins(["sinks.txt"])
    for name in ("gpu.lock", "cpu.lock"):
        assert pins.items() <= {(package, version) for package, version, *_ in lock.locked(TEXTS[name])}


def test_without_uv_the_remedy_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lock.main(["--check"]) == 1
    assert "pip install uv" in capsys.readouterr().err


def test_pins_that_contradict_each_other_are_told_with_the_resolvers_words(monkeypatch, tmp_path, capsys):
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\necho 'because sglang needs numpy<2.4' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lock.main(["--check"]) == 1
    error = capsys.readouterr().err
    assert "gpu.txt" in error and "3.11" in error and "numpy<2.4" in error
