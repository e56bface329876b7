"""``megatron-rl doctor`` on this machine and environment: one line per check, with a remedy if it fails."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.system.gpu.gpu_environment import expandable_segments, nccl_values
from megatron_rl.system.gpu.gpu_stack import Requirement, machine_facts, package_facts

OK, WARN, FAIL, SKIPPED = "OK", "warn", "FAIL", "-"
_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red", SKIPPED: "dim"}
_NAME_WIDTH, _NARROW = 27, 60
"""Width of the name column; terminals narrower than ``_NARROW`` have no such column."""
LIBRARIES = ("torch", "megatron-core", "sglang", "transformers", "numpy")
_NEEDED_MIB = 2048
_EVERYWHERE = ("free disk", "package apex")
"""Facts that also matter without a GPU."""
_TE_TIMEOUT_S = 180.0
_MIN_CUDNN = (9, 6)
"""First cuDNN whose fused attention handles packed sequences with grouped heads on Hopper."""
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class CheckResult:
    name: str
    state: str
    """OK, warn (works, but below its potential), FAIL, or - (does not apply here)."""
    found: str
    remedy: str = ""


def show(line: CheckResult, console: Console) -> None:
    """Print state, name and text in columns, and the remedy on the lines below."""
    table = Table.grid(padding=(0, 1), pad_edge=False)
    table.add_column(width=4, no_wrap=True)
    if console.width > _NARROW:
        table.add_column(width=_NAME_WIDTH, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    state = Text(line.state, style=_STYLES[line.state])
    if console.width > _NARROW:
        table.add_row(state, line.name, Text(line.found))
        before = ["", ""]
    else:
        table.add_row(state, Text(f"{line.name}: {line.found}"))
        before = [""]
    if line.remedy:
        table.add_row(*before, Text(f"→ {line.remedy}"))
    console.print(table)


def environment_lines(folder: str = ".") -> Iterator[CheckResult]:
    """Checks of the calling process: libraries, devices and their needs, Transformer Engine, environment variables.

    ``folder``: output folder of the run, whose disk is checked.
    """
    facts = [*machine_facts(folder, _NEEDED_MIB), *package_facts()]
    # The fact is a version number only if the driver replies.
    has_driver = any(fact.name == "NVIDIA driver" and re.match(r"\d", fact.found) for fact in facts)
    pins = pinned_versions("gpu" if has_driver else "cpu")
    yield from library_lines({name: installed_version(name) for name in LIBRARIES}, pins)
    yield device_line(has_driver=has_driver)
    yield from (fact_line(fact, on_gpu=has_driver) for fact in facts)
    has_engine = any(fact.name == "Transformer Engine" and not fact.remedy for fact in facts)
    if has_engine:
        yield attention_line(_engine_facts())
    yield from variable_lines(os.environ, {name for _, name in socket.if_nameindex()})


def pinned_versions(flavor: str) -> dict[str, str]:
    """Versions pinned in requirements/ for this Python, by package; empty without a checkout."""
    folder = Path(__file__).resolve().parents[3] / "requirements"
    texts = [file.read_text() for name in ("common", "sglang", flavor) if (file := folder / f"{name}.txt").is_file()]
    pins = re.findall(r'^([A-Za-z0-9_.-]+)==([^\s#;]+)(?: ; python_version == "(.+)")?', "\n".join(texts), re.MULTILINE)
    this_python = "{}.{}".format(*sys.version_info)
    return {name: pin for name, pin, python in pins if python in ("", this_python)}


def library_lines(installed: Mapping[str, str], pins: Mapping[str, str]) -> Iterator[CheckResult]:
    for name, found in installed.items():
        pin = pins.get(name, "")
        if not found:
            yield CheckResult(name, FAIL, "not installed", f"bash launch/setup.sh installs {name}{f' {pin}' if pin else ''}")
        # A build tag after "+", such as cu130, is not another version.
        elif pin and found.partition("+")[0] != pin:
            yield CheckResult(name, WARN, f"{found}; requirements/ pins {pin}", "bash launch/setup.sh installs the tested versions")
        else:
            yield CheckResult(name, OK, found)


def device_line(*, has_driver: bool) -> CheckResult:
    """The GPUs that torch can use. Fails if a driver is present but torch has no GPU: a run would then train on CPUs."""
    import torch

    name = "GPUs visible to torch"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if devices:
        kinds = sorted({f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in devices})
        return CheckResult(name, OK, f"{len(devices)} ({'; '.join(kinds)}), CUDA {torch.version.cuda}")
    if not has_driver:
        return CheckResult(name, SKIPPED, "none, and no driver: everything runs on the CPU here")
    cause = "torch is a CPU build" if torch.version.cuda is None else f"torch is built for CUDA {torch.version.cuda}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
    remedy = "FLAVOR=gpu bash launch/setup.sh, unset CUDA_VISIBLE_DEVICES, or a newer driver (see below)"
    return CheckResult(name, FAIL, f"none, although the driver replies: {cause}{shown}", remedy)


def fact_line(fact: Requirement, *, on_gpu: bool) -> CheckResult:
    found = f"{fact.found} (needed: {fact.wanted})" if fact.remedy else fact.found
    if not fact.remedy:
        return CheckResult(fact.name, OK, found)
    if not on_gpu and fact.name not in _EVERYWHERE and (not fact.is_needed or fact.name != "Transformer Engine"):
        return CheckResult(fact.name, SKIPPED, f"{fact.found}; GPUs need {fact.wanted}")
    return CheckResult(fact.name, FAIL if fact.is_needed else WARN, found, fact.remedy)


_ENGINE_FACTS = """
import importlib.metadata, json, torch, transformer_engine, transformer_engine.pytorch
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return ""
print("facts", json.dumps({"version": transformer_engine.__version__, "cudnn": torch.backends.cudnn.version() or 0,
    "flash_attn": version("flash_attn"), "flash_attn_3": version("flash_attn_3")}))
"""


def _engine_facts() -> dict[str, Any]:
    """Transformer Engine's facts, read in a separate process: a build for another torch version may crash on import."""
    command = [sys.executable, "-c", _ENGINE_FACTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"its import did not finish within {_TE_TIMEOUT_S:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("facts ")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1].removeprefix("facts "))
    output = done.stderr.strip().splitlines()
    return {"error": output[-1] if output else f"its import exited with status {done.returncode}"}


def attention_line(facts: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> CheckResult:
    """Attention kernels of Transformer Engine that can be used; ``facts`` comes from ``_engine_facts``."""
    name = "attention kernels"
    if "error" in facts:
        remedy = "rebuild it for this torch: FLAVOR=gpu bash launch/setup.sh"
        return CheckResult(name, FAIL, f"Transformer Engine does not import: {facts['error']}", remedy)
    # torch encodes 9.24.0 as 92400.
    cudnn = (facts["cudnn"] // 10000, facts["cudnn"] // 100 % 100)
    usable = {
        f"fused (cuDNN {cudnn[0]}.{cudnn[1]})": cudnn >= _MIN_CUDNN and environ.get("NVTE_FUSED_ATTN", "1") != "0",
        f"flash-attn {facts['flash_attn_3'] or facts['flash_attn']}": bool(facts["flash_attn"] or facts["flash_attn_3"])
        and environ.get("NVTE_FLASH_ATTN", "1") != "0",
    }
    kernels = [kernel for kernel, is_usable in usable.items() if is_usable]
    if kernels:
        return CheckResult(name, OK, f"Transformer Engine {facts['version']}: {', '.join(kernels)}; float32 uses the unfused kernel")
    wanted = ".".join(map(str, _MIN_CUDNN))
    return CheckResult(
        name,
        WARN,
        f"Transformer Engine {facts['version']}: only the unfused kernel, which pads to the longest sequence and stores all scores",
        f"install cuDNN {wanted} or newer or flash-attn, and leave NVTE_FUSED_ATTN and NVTE_FLASH_ATTN unset",
    )


def variable_lines(environ: Mapping[str, str], interfaces: set[str]) -> Iterator[CheckResult]:
    """Environment variables that affect NCCL, gloo and the allocator."""
    values = nccl_values(environ)
    given = {name: value for name, value in sorted(environ.items()) if name.startswith(("NCCL_", "GLOO_", "UCX_"))}
    text = ", ".join(f"{name}={value}" for name, value in {**values, **given}.items())
    mixed = len(set(values.values())) > 1
    remedy = "servers and ranks of one run need the same values: 0 for both, or 1 for both on multi-node NVLink"
    yield CheckResult("NCCL variables", WARN if mixed else OK, text, remedy if mixed else "")
    for name in _INTERFACE_VARIABLES:
        wanted = environ.get(name, "")
        # NCCL accepts prefixes, "=" for exact names and "^" for all except these.
        known = any(own.startswith(part.lstrip("=")) for part in wanted.split(",") for own in interfaces)
        if wanted and not wanted.startswith("^") and not known:
            yield CheckResult(name, FAIL, f"{wanted} is not an interface of this machine", f"take one of {', '.join(sorted(interfaces))}")
    if expandable := expandable_segments(environ):
        yield CheckResult(
            "allocator",
            WARN,
            f"{expandable}: colocated servers would free nothing when they sleep",
            "unset it for rollout.placement=colocated",
        )


def installed_version(name: str) -> str:
    """Version of a package; an empty string if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
