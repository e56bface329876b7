"""tools/gpu_validate.py on the CPU: its sections run, its verdicts can be bad, and a section that fails is named."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(autouse=True)
def tools_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections run here instead of in a process each, which would import everything again."""
    import gpu_sections
    import gpu_validate

    def run_section(name: str, job: dict[str, Any], scratch: Path, *, device: str, **_: Any) -> list[dict[str, Any]]:
        job = {**job, "scratch": str(scratch), "out": str(scratch / f"{name}-{device}.jsonl")}
        return json.loads(json.dumps(list(gpu_sections.SECTIONS[name](job))))

    monkeypatch.setattr(gpu_validate, "run_section", run_section)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path, on a machine without a GPU")
def test_parity_and_training_run_on_the_cpu_and_are_reported(in_this_process: None, tmp_path: Path) -> None:
    from gpu_validate import main

    arguments = ["--device=cpu", "--tiny", "--sections=parity,training", f"--out={tmp_path}"]
    assert main([*arguments, "--families=qwen3,deepseek_v3", "--models=tiny-moe"]) == 0
    parity, training = json.loads((tmp_path / "results.json").read_text())
    assert [row["family"] for row in parity["rows"]] == ["qwen3", "deepseek_v3"]
    assert all(row["verdict"] == "same" for row in parity["rows"]) and not parity["failures"]
    (row,) = training["rows"]
    assert row["tokens_per_s"] == pytest.approx(256 / row["s_per_step"])
    assert row["mfu"] is None and row["tflops_per_rank"] > 0
    text = (tmp_path / "results.md").read_text()
    assert "## parity: ok" in text and "| tiny-moe | tp1, 1 ranks |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path, on a machine without a GPU")
def test_a_section_is_a_process_and_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    from gpu_validate import main

    assert main(["--device=cuda", "--sections=environment", f"--out={tmp_path}"]) == 1
    (section,) = json.loads((tmp_path / "results.json").read_text())
    assert section["failures"] == ["no GPU is visible; use --device cpu to run the same code on the CPU"]
    assert {"what": "layers", "found": "this project's, in plain PyTorch"} in section["rows"]


def outputs(shift: float = 0.0, scale: float = 1.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    change = {"a": torch.randn(20, generator=generator), "b": torch.randn(4, 5, generator=generator)}
    return {
        "logprobs": -torch.rand(30, generator=generator) + shift,
        "grad_norm": 2.0 * scale,
        "change": {name: value * scale for name, value in change.items()},
    }


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (outputs(), "same"),
        (outputs(shift=1e-3), "logprob_mean differs by 1.00e-03, allowed 1.00e-04"),
        (outputs(scale=1.001), "grad_norm differs by 1.00e-03"),
        (outputs(shift=float("nan")), "logprob_mean differs by nan"),
    ],
)
def test_a_verdict_names_what_differs(found: dict[str, Any], expected: str) -> None:
    from gpu_validate import distances, verdict

    assert verdict(distances(found, outputs()), None).startswith(expected)


def test_bfloat16_is_judged_by_what_it_costs_on_the_cpu() -> None:
    from gpu_validate import distances, verdict

    yardstick = distances(outputs(shift=0.01, scale=1.01), outputs())
    assert verdict(distances(outputs(shift=0.02, scale=0.98), outputs()), yardstick) == "same"
    assert verdict(distances(outputs(shift=0.05), outputs()), yardstick).startswith("logprob_mean differs by 5.00e-02")


def test_an_update_in_another_direction_is_noticed_though_its_norm_is_the_same() -> None:
    from gpu_validate import distances, verdict

    turned = outputs()
    turned["change"] = {name: -value for name, value in turned["change"].items()}
    assert verdict(distances(turned, outputs()), None).startswith("update differs by 2.00e+00")


@pytest.mark.parametrize(
    ("device", "tflops"),
    [("NVIDIA H200", 989.0), ("NVIDIA H20", 148.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA L4", 121.0), ("cpu", None)],
)
def test_peaks_go_by_the_name_of_the_device(device: str, tflops: float | None) -> None:
    from gpu_validate import peak_tflops

    assert peak_tflops(device) == tflops


def test_the_share_of_the_peak_is_operations_over_time_and_ranks() -> None:
    from gpu_validate import training_row

    row = {"num_ranks": 2, "num_tokens": 100, "s_per_step": 0.5, "flops_per_step": 989e12, "peak_gib": 1.0}
    found = training_row("m", "tp2", {**row, "device": "NVIDIA H200", "grad_norm": 1.0})
    assert found["mfu"] == pytest.approx(1.0) and found["tokens_per_s"] == 200


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo out of memory; exit 3", "exit status 3; its last lines: out of memory"),
        ("echo waiting; sleep 60", "not done after 3 s and stopped; its last lines: waiting"),
        ("exit 1", "exit status 1; it said nothing"),
    ],
)
def test_a_process_that_fails_or_hangs_is_named_with_its_last_words(program: str, reason: str, tmp_path: Path) -> None:
    from gpu_validate import SectionFailed, run_process

    # A shell: it has begun long before the deadline, also where the machine is busy.
    with pytest.raises(SectionFailed) as failure:
        list(run_process(["sh", "-c", program], tmp_path, "cpu", 3.0))
    assert str(failure.value).startswith(reason)


def test_a_failure_does_not_keep_the_other_sections_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import gpu_validate

    def breaks(section: Any, arguments: argparse.Namespace, scratch: Path) -> None:
        raise gpu_validate.SectionFailed("exit status 1; its last lines: broken | pipe")

    def stumbles(section: Any, arguments: argparse.Namespace, scratch: Path) -> None:
        raise KeyError("a field that is not there")

    def works(section: Any, arguments: argparse.Namespace, scratch: Path) -> None:
        section.rows = [{"value": 1.0}]

    monkeypatch.setattr(gpu_validate, "RUNS", {"parity": breaks, "tppo": stumbles, "training": works})
    assert gpu_validate.main(["--sections=parity,tppo,training", f"--out={tmp_path}"]) == 1
    text = (tmp_path / "results.md").read_text()
    assert "## tppo: FAILED" in text and "a field that is not there" in text
    assert "## parity: FAILED" in text and "broken | pipe" in text and "## training: ok" in text


def test_a_row_is_saved_before_the_next_one_and_stays_when_the_section_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_validate

    def breaks(section: Any, arguments: argparse.Namespace, scratch: Path) -> None:
        section.add({"value": 1.0})
        assert json.loads((tmp_path / "results.json").read_text())[0]["rows"] == [{"value": 1.0}]
        raise gpu_validate.SectionFailed("the machine was taken away")

    monkeypatch.setattr(gpu_validate, "RUNS", {"parity": breaks})
    assert gpu_validate.main(["--sections=parity", f"--out={tmp_path}"]) == 1
    text = (tmp_path / "results.md").read_text()
    assert "| value |\n|---|\n| 1 |" in text and "- FAILED: the machine was taken away" in text
    assert "  value 1\n" in capsys.readouterr().out


def test_rows_arrive_while_their_section_still_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gpu_validate

    def process(*_: Any) -> Iterator[None]:
        with (tmp_path / "training-cpu.jsonl").open("a", buffering=1) as file:
            for text in ('{"a": 1}\n{"a"', ": 2}\n", '{"a": 3}\n'):
                file.write(text)
                file.flush()
                yield
        raise gpu_validate.SectionFailed("exit status 1")

    monkeypatch.setattr(gpu_validate, "run_process", process)
    rows = gpu_validate.run_section("training", {}, tmp_path, device="cpu", deadline_s=1.0)
    assert [next(rows) for _ in range(3)] == [{"a": 1}, {"a": 2}, {"a": 3}]
    with pytest.raises(gpu_validate.SectionFailed):
        next(rows)


def test_a_section_beyond_the_limit_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gpu_validate

    deadlines = []
    runs = {
        name: lambda section, arguments, scratch: deadlines.append(arguments.deadline_s) for name in ("parity", "tppo")
    }
    monkeypatch.setattr(gpu_validate, "RUNS", runs)
    assert gpu_validate.main(["--sections=parity,tppo", "--limit-s=100", f"--out={tmp_path}"]) == 0
    assert all(0 < deadline <= 100 for deadline in deadlines) and len(deadlines) == 2
    assert gpu_validate.main(["--sections=parity,tppo", "--limit-s=0", f"--out={tmp_path}"]) == 1
    assert "- FAILED: not reached within --limit-s 0" in (tmp_path / "results.md").read_text()


@pytest.mark.skipif(
    sys.prefix == sys.base_prefix, reason="needs an interpreter without the packages: run in a virtual environment"
)
def test_packages_may_lie_on_pythonpath_alone(tmp_path: Path) -> None:
    """A lent machine has its own Python; what it lacks is carried there and named by PYTHONPATH."""
    packages = Path(torch.__file__).parents[1]
    command = [str(Path(sys.base_prefix) / "bin" / "python3"), str(TOOLS / "gpu_validate.py"), "--device=cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--sections=weight_sync", f"--out={tmp_path}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [without_sglang(tmp_path), packages]))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    (weight_sync,) = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["server"] for row in weight_sync["rows"]] == ["tools/ipc_server.py"] * 3


def without_sglang(folder: Path) -> Path:
    """A folder for PYTHONPATH in which Python finds no SGLang, wherever else it is installed."""
    (folder / "bare").mkdir()
    (folder / "bare/sitecustomize.py").write_text(
        "import importlib.abc, importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'sglang' else found(name, *rest)\n"
    )
    return folder / "bare"


def test_both_files_name_the_same_families_and_models() -> None:
    import gpu_sections
    import gpu_validate

    assert set(gpu_validate.FAMILIES) == set(gpu_sections.FAMILIES)
    named = {name for names in gpu_validate.TRAINING_MODELS.values() for name in names}
    assert named == set(gpu_sections.MODELS)
