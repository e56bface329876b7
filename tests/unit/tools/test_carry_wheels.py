"""Wheels for a machine without a registry: the right ones, in pieces that the printed command joins and installs."""

import subprocess
import zipfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(autouse=True)
def tools_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


def write_wheel(folder: Path, name: str, num_bytes: int) -> None:
    """A wheel with one module, which has a comment of ``num_bytes``."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"NAME = {name!r}\n#{'x' * num_bytes}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def join(folder: Path) -> subprocess.CompletedProcess[str]:
    import carry_wheels

    command = f"{carry_wheels.JOIN} && python3 -c 'import alpha, beta; print(alpha.NAME, beta.NAME)'"
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_printed_command_installs_what_was_cut_and_refuses_a_damaged_piece(tmp_path: Path) -> None:
    import carry_wheels

    wheels, out = tmp_path / "wheels", tmp_path / "there"
    wheels.mkdir()
    out.mkdir()
    (out / "carry.tar.099").write_bytes(b"of an earlier run")
    write_wheel(wheels, "alpha", 30_000)
    write_wheel(wheels, "beta", 500)
    pieces = carry_wheels.cut(wheels, out, piece_bytes=10_000)
    assert len(pieces) >= 4 and all(piece.stat().st_size <= 10_000 for piece in pieces)
    assert sorted(path.name for path in out.iterdir()) == ["SHA256SUMS", *(piece.name for piece in pieces)]
    done = join(out)
    assert done.returncode == 0 and done.stdout.endswith("alpha beta\n"), done.stderr
    pieces[1].write_bytes(b"0" + pieces[1].read_bytes()[1:])
    assert join(out).returncode != 0


def test_packages_that_are_there_or_belong_to_torch_are_not_carried() -> None:
    import carry_wheels

    there = carry_wheels.read_packages(["NumPy==2.3.5", "rich", "transformers==5.17.0", "torch==2.11.0+cu130", ""])
    assert there == {"numpy": "2.3.5", "rich": "", "transformers": "5.17.0", "torch": "2.11.0"}
    needed = {"numpy": "2.3.5", "rich": "15", "transformers": "5.19.0", "torch": "2.13", "nvidia-nccl": "1", "orjson": "3"}
    assert carry_wheels.missing(needed, there) == {"transformers": "5.19.0", "orjson": "3"}


def test_transformer_engine_is_compiled_for_the_other_machine_and_its_pins_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import carry_wheels

    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    carry_wheels.add_transformer_engine(Path("/other/python"), "3.12", tmp_path)
    downloaded, compiled = commands
    assert "3.12" in downloaded and any(word.startswith("transformer-engine-cu13==2.") for word in downloaded)
    assert compiled[0] == "/other/python" and compiled[-1].endswith("requirements/gpu-build.lock")
