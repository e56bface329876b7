"""Adds to pyproject.toml what is read from files: extras from requirements/, and the files of `megatron-rl examples`.

pip cannot bring all that an extra needs; launch/setup.sh does. ``cpu``: SGLang, whose own requirements are CUDA packages (pip install
--no-deps -r requirements/sglang.txt), libseccomp2. ``gpu``: Transformer Engine's extension for PyTorch, which is
compiled for the installed torch, and NVIDIA Apex.
"""

import os
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def pins(name: str) -> list[str]:
    """Requirement lines of a file, those of the files it includes among them."""
    found: list[str] = []
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        requirement = line.split("#")[0].strip()
        if requirement.startswith("-r "):
            found += pins(requirement.removeprefix("-r ").strip())
        elif requirement:
            found.append(requirement)
    return found


def shared_files() -> list[tuple[str, list[str]]]:
    """(folder in an environment, files) of what `megatron-rl examples` writes out."""
    folders = [walked for name in ("examples", "launch", "requirements") for walked in os.walk(ROOT / name)]
    found = [(os.path.relpath(path, ROOT), names) for path, _, names in folders if names and "__pycache__" not in path]
    found.append(("tools", ["prepare_data.py"]))
    return [(f"share/megatron_rl/{path}", [f"{path}/{name}" for name in names]) for path, names in found if (ROOT / path).is_dir()]


setup(
    extras_require={
        "cpu": pins("cpu.txt"),
        "gpu": pins("gpu.txt"),
        "test": pins("test.txt"),
        "docs": pins("docs.txt"),
        "tensorboard": [pin for pin in pins("sinks.txt") if pin.startswith("tensorboard")],
        "wandb": [pin for pin in pins("sinks.txt") if pin.startswith("wandb")],
    },
    data_files=shared_files(),
)
