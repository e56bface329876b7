"""Resolve the pins and write the resulting locks, with hashes, for Python 3.11 and 3.12 on x86-64 Linux.

    pip install uv
    python tools/lock.py                                # requirements/cpu.lock, gpu.lock and gpu-build.lock as of now
    python tools/lock.py --as-of 2026-11-22T19:37:00Z   # with the packages available at that time
    python tools/lock.py --check                        # resolve again as of the time of the locks, and compare

uv reads the registry's metadata and downloads no wheels: it takes seconds, on any machine. A line of the lock is one
package with the hashes of the files that fit; where the two Pythons need other versions, each has its own line.
``cpu.lock`` and ``gpu.lock`` contain only wheels. ``cpu.lock`` leaves out torch, torchvision and the packages that CUDA
builds of torch need: launch/setup.sh chooses their builds on the machine. SGLang is in it without what it requires.
``gpu-build.lock`` contains packages to compile against the torch of ``gpu.lock``.
"""

import argparse
import datetime
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-manylinux_2_34"
_ALONE = ("sglang.txt", "gpu-build.txt")
"""Files whose packages are locked without what they require."""
SOURCES = {
    "gpu.lock": ("gpu.txt", "test.txt", "sinks.txt"),
    "gpu-build.lock": ("gpu-build.txt",),
    "cpu.lock": ("cpu.txt", "test.txt", "sinks.txt", "sglang.txt"),
}
"""Pins by the lock that is made from them."""
_FROM_WHEELS = ("cpu.lock", "gpu.lock")
TORCH = re.compile(r"(torch|torchvision)$|nvidia-|cuda-")
"""Packages that ``cpu.lock`` leaves out."""
_MARKER = " ; python_version == "
_HEADER = "# Made by tools/lock.py as of {time} for Python {pythons} on {platform}. Never change it by hand.\n# pins: {digest}\n"

Versions = Mapping[str, tuple[str, frozenset[str]]]
"""(version, sha256 of its files) by package, for one Python."""


def read_pins(names: Sequence[str], folder: Path = ROOT / "requirements", python: str = PYTHONS[-1]) -> dict[str, str]:
    """Version by package, as the registries write its name; of files and the files that they include, for one Python."""
    pins: dict[str, str] = {}
    for name in names:
        for line in (folder / name).read_text().splitlines():
            requirement = line.split("#")[0].strip()
            if requirement.startswith("-r "):
                pins |= read_pins([requirement.removeprefix("-r ").strip()], folder, python)
                continue
            pin, _, marker = requirement.partition(_MARKER)
            if pin and marker.strip('"') in ("", python):
                package, version = pin.split("==")
                pins[canonical(package)] = version
    return pins


def canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def digest(pins: Iterable[tuple[str, str]]) -> str:
    """Digest of (package, version), without comments and order: a lock names the pins that it was made from."""
    return hashlib.sha256("\n".join(f"{name}=={version}" for name, version in sorted(set(pins))).encode()).hexdigest()


def all_pins(name: str) -> set[tuple[str, str]]:
    """(package, version) of the pins of a lock, for both Pythons."""
    return {pin for python in PYTHONS for pin in read_pins(SOURCES[name], python=python).items()}


def lock_text(resolved: Mapping[str, Versions], time: str, pins: Iterable[tuple[str, str]]) -> str:
    """The lock of what each Python resolved to."""
    lines: dict[tuple[str, str], str] = {}
    for package in sorted(set().union(*resolved.values())):
        found: dict[str, list[str]] = {}
        for python, versions in resolved.items():
            if package in versions:
                found.setdefault(versions[package][0], []).append(python)
        for version, pythons in found.items():
            hashes = sorted(set().union(*(resolved[python][package][1] for python in pythons)))
            marker = "" if len(pythons) == len(resolved) else f'{_MARKER}"{pythons[0]}"'
            lines[package, version] = " ".join([f"{package}=={version}{marker}", *(f"--hash=sha256:{one}" for one in hashes)])
    header = _HEADER.format(time=time, pythons=" and ".join(resolved), platform=PLATFORM, digest=digest(pins))
    return header + "".join(f"{line}\n" for line in lines.values())


def locked(text: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """(package, version, Python or "" for all, sha256 of its files) of each line of a lock."""
    for line in text.splitlines():
        if not line.startswith("#"):
            requirement, *hashes = line.split(" --hash=sha256:")
            pin, _, marker = requirement.partition(_MARKER)
            package, version = pin.split("==")
            yield package, version, marker.strip('"'), hashes


def _resolve(name: str, python: str, time: str, scratch: Path) -> Versions:
    versions: dict[str, tuple[str, frozenset[str]]] = {}
    together = [source for source in SOURCES[name] if source not in _ALONE]
    for sources in (together, *([source] for source in SOURCES[name] if source in _ALONE)):
        if sources:
            versions |= _resolve_files(sources, python, time, scratch, only_wheels=name in _FROM_WHEELS)
    return {package: found for package, found in versions.items() if name != "cpu.lock" or not TORCH.match(package)}


def _resolve_files(sources: Sequence[str], python: str, time: str, scratch: Path, *, only_wheels: bool) -> Versions:
    out = scratch / "pylock.toml"
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--upgrade", "--format", "pylock.toml"]
    command += ["--python-version", python, "--python-platform", PLATFORM, "--exclude-newer", time, "--output-file", str(out)]
    command += ["--only-binary", ":all:"] if only_wheels else []
    command += ["--no-deps"] if sources[0] in _ALONE else []
    done = subprocess.run([*command, *sources], cwd=ROOT / "requirements", capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{' and '.join(sources)} cannot be resolved for Python {python}:\n{done.stderr.strip()}")
    packages = tomllib.loads(out.read_text())["packages"]
    return {package["name"]: (package["version"], _hashes(package)) for package in packages}


def _hashes(package: Mapping[str, Any]) -> frozenset[str]:
    files = package.get("wheels") or [package["sdist"]]
    return frozenset(file["hashes"]["sha256"] for file in files)


def make_lock(name: str, time: str) -> str:
    """The text of a lock as of a time (ISO 8601). Raises UserError where the pins contradict each other."""
    with tempfile.TemporaryDirectory(prefix="megatron-rl-lock-") as scratch:
        resolved = {python: _resolve(name, python, time, Path(scratch)) for python in PYTHONS}
    return lock_text(resolved, time, all_pins(name))


def _time(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text):
        raise argparse.ArgumentTypeError(f"expected a time in UTC such as 2026-11-22T19:37:00Z, got {text!r}")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A time, not a day: the registry may get a package later on the day on which a lock is made.
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    parser.add_argument("--as-of", default=now, type=_time, help="time in UTC, YYYY-MM-DDTHH:MM:SSZ (default: now)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a lock differs from its resolved pins")
    asked = parser.parse_args(arguments)
    status = 0
    try:
        for name in SOURCES:
            path = ROOT / "requirements" / name
            if not asked.check:
                path.write_text(make_lock(name, asked.as_of))
                print(f"{path.relative_to(ROOT)}: {sum(1 for _ in locked(path.read_text()))} packages")
                continue
            text = path.read_text()
            time = re.search(r" as of (\S+) ", text)
            is_same = time is not None and make_lock(name, time[1]) == text
            print(f"{path.relative_to(ROOT)}: {'as resolved' if is_same else 'NOT what its pins come to: run tools/lock.py'}")
            status |= not is_same
    except FileNotFoundError as error:
        print(f"lock: error: {error}; uv does the resolving: pip install uv", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"lock: error: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
