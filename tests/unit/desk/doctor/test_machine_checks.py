"""Checks of ``megatron-rl doctor``: states, remedies, and layout in a terminal."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron_rl.cli import main
from megatron_rl.desk.doctor import all_checks
from megatron_rl.desk.doctor.machine_checks import (
    FAIL,
    OK,
    SKIPPED,
    WARN,
    CheckResult,
    attention_line,
    device_line,
    environment_lines,
    fact_line,
    library_lines,
    pinned_versions,
    show,
    variable_lines,
)
from megatron_rl.system.gpu.gpu_stack import Requirement
from tests.unit.config.recipes import DENSE, load

ENGINE = {"version": "2.20.2", "cudnn": 92400, "flash_attn": "", "flash_attn_3": ""}
REMEDY = "free some space, or choose a folder on a larger disk; a remedy has to stay readable too, whatever its length"
LINES = (
    CheckResult("torch", OK, "2.14.1+cu130"),
    CheckResult("fused gradient accumulation", WARN, "none (needed: fused_weight_gradient_mlp_cuda of NVIDIA Apex)", REMEDY),
    CheckResult("log-prob parity", FAIL, "log-probs of 1024 sampled tokens differ " + "between Megatron and SGLang " * 8, REMEDY),
)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_results_fit_the_terminal_and_lose_no_word(width: int) -> None:
    output = io.StringIO()
    for line in LINES:
        show(line, Console(file=output, width=width))
    printed = output.getvalue().splitlines()
    assert max(map(len, printed)) <= width
    assert [text.split()[0] for text in printed if not text.startswith(" ")] == [OK, WARN, FAIL]
    # Lines wrap only between words, and no word is lost.
    words = " ".join(printed).split()
    for line in LINES:
        for word in f"{line.name} {line.found} {line.remedy}".split():
            assert word in words or f"{word}:" in words, word


def states(lines: Any) -> dict[str, str]:
    return {line.name: line.state for line in lines}


def test_library_versions_are_compared_with_pins_ignoring_build_tags() -> None:
    installed = {"torch": "2.14.1+cu130", "sglang": "0.5.9", "megatron-core": "", "numpy": "2.3.5"}
    lines = list(library_lines(installed, {"torch": "2.14.1", "sglang": "0.5.23", "megatron-core": "0.16.1"}))
    assert states(lines) == {"torch": OK, "sglang": WARN, "megatron-core": FAIL, "numpy": OK}
    assert "0.5.9; requirements/ pins 0.5.23" in lines[1].found and "0.16.1" in lines[2].remedy


@pytest.mark.parametrize("flavor", ["cpu", "gpu"])
def test_pinned_versions_reads_the_requirements_of_the_checkout(flavor: str) -> None:
    pins = pinned_versions(flavor)
    assert {"torch", "megatron-core", "sglang", "transformers"} <= pins.keys()
    assert all(version[0].isdigit() for version in pins.values())


def test_device_line_fails_if_torch_cannot_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_line(has_driver=False).state == SKIPPED
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = device_line(has_driver=True)
    assert hidden.state == FAIL and "CUDA_VISIBLE_DEVICES=''" in hidden.found and hidden.remedy
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=141 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert device_line(has_driver=True).found.startswith("8 (NVIDIA H200, 141 GiB, sm_90)")


def test_gpu_requirements_are_skipped_on_nodes_without_gpus() -> None:
    missing = Requirement("Transformer Engine", "none", "its three packages", "build it", is_needed=False)
    bare = Requirement("Transformer Engine", "transformer_engine 2.20.2", "its three packages", "build it")
    glibc, disk = Requirement("glibc", "2.31", "2.34", "upgrade"), Requirement("free disk", "1 MiB", "2048 MiB", "free some space")
    apex = Requirement("package apex", "apex 0.9, not NVIDIA's", "none", "pip uninstall apex")
    assert [fact_line(fact, on_gpu=True).state for fact in (missing, bare, glibc, disk, apex)] == [WARN, *[FAIL] * 4]
    on_cpu = [fact_line(fact, on_gpu=False).state for fact in (missing, bare, glibc, disk, apex)]
    assert on_cpu == [SKIPPED, FAIL, SKIPPED, FAIL, FAIL]
    assert fact_line(Requirement("glibc", "2.39", "2.34"), on_gpu=False) == CheckResult("glibc", OK, "2.39")


@pytest.mark.parametrize(
    ("facts", "environ", "state", "words"),
    [
        ({}, {}, OK, "fused (cuDNN 9.24)"),
        ({"flash_attn": "2.8.3"}, {}, OK, "flash-attn 2.8.3"),
        ({"cudnn": 90500}, {}, WARN, "only the unfused kernel"),
        ({}, {"NVTE_FUSED_ATTN": "0"}, WARN, "only the unfused kernel"),
        ({"flash_attn_3": "3.0"}, {"NVTE_FUSED_ATTN": "0"}, OK, "flash-attn 3.0"),
        ({"flash_attn": "2.8.3"}, {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}, WARN, "only the unfused kernel"),
        ({"error": "ImportError: undefined symbol"}, {}, FAIL, "undefined symbol"),
    ],
)
def test_attention_line_lists_the_usable_kernels(facts: dict[str, Any], environ: dict[str, str], state: str, words: str) -> None:
    line = attention_line({**ENGINE, **facts}, environ)
    assert line.state == state and words in line.found and bool(line.remedy) is (state != OK)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"NCCL variables": OK}),
        ({"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}, {"NCCL variables": OK}),
        ({"NCCL_CUMEM_ENABLE": "1"}, {"NCCL variables": WARN}),
        ({"NCCL_SOCKET_IFNAME": "eth"}, {"NCCL variables": OK}),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, {"NCCL variables": OK}),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, {"NCCL variables": OK, "GLOO_SOCKET_IFNAME": FAIL}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {"NCCL variables": OK, "allocator": WARN}),
    ],
)
def test_variable_lines_check_nccl_interfaces_and_allocator(environ: dict[str, str], expected: dict[str, str]) -> None:
    lines = list(variable_lines(environ, {"lo", "eth0"}))
    assert states(lines) == expected
    assert all(f"{name}={value}" in lines[0].found for name, value in environ.items() if name.startswith(("NCCL", "GLOO")))


def test_environment_lines_cover_all_checks_and_none_fails_here() -> None:
    found = states(environment_lines())
    assert FAIL not in found.values(), found
    assert {"torch", "sglang", "GPUs visible to torch", "NVIDIA driver", "glibc", "C++ compiler", "free disk"} <= found.keys()
    assert {"Transformer Engine", "package apex", "NCCL variables"} <= found.keys()


def test_doctor_rejects_a_recipe_with_too_few_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(tmp_path, DENSE)
    monkeypatch.setattr(all_checks, "count_gpus", lambda: 1)
    assert main(["doctor", "--model", str(tmp_path / "model")]) == 2
    assert "1 server workers and the 1 trainer ranks of this node need 2 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--invariance"], "needs --model FOLDER and --layouts"),
        (["--invariance", "--model=m", "--layouts=tp2", "--config=a.yaml"], "no recipe"),
        (["--model=m", "--config=a.yaml"], "replaces a recipe"),
        (["policy.path=m"], "overrides a recipe"),
        (["--model=/no/such/folder"], "has no config.json"),
    ],
)
def test_doctor_rejects_bad_arguments_before_anything_starts(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert expected in capsys.readouterr().err
