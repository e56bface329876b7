"""Package metadata. The pins that work together live in requirements/*.txt; the extras read them from there."""

from pathlib import Path

from setuptools import find_packages, setup

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


setup(
    name="megatron_rl",
    version="0.1.0",
    description="Megatron-backed RLHF trainer: T-PPO with Megatron Core models and SGLang rollouts",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The megatron_rl authors",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={
        "megatron_rl": ["py.typed"],
        "megatron_rl.config": ["presets/*.yaml"],
        "megatron_rl.desk.doctor": ["*.json"],
        "megatron_rl.desk.costs": ["*.yaml"],
        "megatron_rl.desk.report": ["*.js", "*.css"],
    },
    install_requires=[],  # a CPU and a GPU machine need different builds of the same packages: choose an extra
    extras_require={
        "cpu": pins("cpu.txt"),
        "gpu": pins("gpu.txt"),
        "test": pins("test.txt"),
        "docs": pins("docs.txt"),
        "tensorboard": [pin for pin in pins("sinks.txt") if pin.startswith("tensorboard")],
        "wandb": [pin for pin in pins("sinks.txt") if pin.startswith("wandb")],
    },
    entry_points={
        "console_scripts": ["megatron-rl = megatron_rl.cli:main"],
        "sglang.srt.platforms": ["torch_cpu = megatron_rl.cpu.sglang_platform:activate"],
    },
)
