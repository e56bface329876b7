"""Versions of what is installed, and what to install where a package is missing; imports none of them."""

import sys
from importlib.metadata import PackageNotFoundError, version

_ENGINES = ("torch", "megatron-core", "sglang")


def version_text(own_version: str) -> str:
    """One line per package: this one, Python, and the engines that are installed."""
    lines = [f"megatron-rl {own_version}", f"python {sys.version.split()[0]}"]
    return "\n".join([*lines, *(f"{name} {_version(name)}" for name in _ENGINES)])


def missing_package(error: ModuleNotFoundError) -> str:
    """The problem and its remedy in one line; "" if the missing module is none of another package."""
    package = (error.name or "").partition(".")[0]
    if not package or package == "megatron_rl" or package in sys.stdlib_module_names:
        return ""
    return (
        f"this command needs {package}, which is not installed: `megatron-rl examples DIR && bash DIR/launch/setup.sh` installs it here; "
        "pip install 'megatron_rl[cpu]' omits SGLang, pip install 'megatron_rl[gpu]' Transformer Engine"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
