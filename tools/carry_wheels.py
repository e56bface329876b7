"""Collect the packages that a machine without a package registry lacks, cut in pieces that a small channel can carry.

    python tools/carry_wheels.py --out .carry --python 3.12 --there there.txt
    python tools/carry_wheels.py --out .carry --python 3.12 --there there.txt --build-python /path/to/venv/bin/python

``there.txt`` is `python3 -m pip list --format=freeze` of that machine, or only names, one per line. What
`tools/gpu_sections.py` imports is carried in the versions that are installed here, except for packages that are there (in
the same version, if there.txt has versions), torch and what belongs to CUDA. ``--build-python`` adds Transformer Engine:
its Python code, NVIDIA's kernels, and its extension, compiled by a virtual environment that has that machine's Python and
torch and a CUDA toolkit (requirements/gpu.txt); a build for another torch does not load. Compiling takes about 30 minutes
of one core.

The result is ``carry.tar.000``, ``carry.tar.001``, ... of at most 48 MB, with ``SHA256SUMS`` and the command, printed last,
that verifies, joins and installs them once all are in one folder of that machine.
"""

import argparse
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lock import canonical, read_pins

ROOT = Path(__file__).resolve().parents[1]
PIECE_BYTES = 48_000_000
_OF_TORCH = re.compile(r"(torch|torchvision|triton)$|nvidia-|cuda-|transformer-engine|megatron-rl$")
"""Packages that the machine has with its torch, that --build-python brings, or that travel as the checkout."""
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 24, 17)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
_IMPORTED = (
    "import sys; sys.path.insert(0, 'tools'); import gpu_sections, gpu_validate, ipc_server; "
    "print(*{name.partition('.')[0] for name in sys.modules})"
)
JOIN = (
    "sha256sum -c SHA256SUMS && cat carry.tar.* | tar -x && python3 -m pip install -q --no-index --no-deps --no-compile "
    "--target site wheels/*.whl && export PYTHONPATH=$PWD/site"
)
"""Command for the folder with all pieces, on the other machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pieces, best one that git ignores")
    parser.add_argument("--python", default="3.12", help="version of that machine's Python (default: 3.12)")
    parser.add_argument("--there", type=Path, help="file with the packages that the machine has")
    parser.add_argument("--build-python", type=Path, help="Python of the environment that compiles Transformer Engine")
    given = parser.parse_args(arguments)
    wheels = given.out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    there = read_packages(given.there.read_text().splitlines() if given.there else [])
    chosen = missing(imported_packages(), there)
    download([f"{name}=={version}" for name, version in sorted(chosen.items())], given.python, wheels)
    if given.build_python:
        add_transformer_engine(given.build_python, given.python, wheels)
    pieces = cut(wheels, given.out)
    print(f"{len(list(wheels.glob('*.whl')))} wheels in {len(pieces)} pieces in {given.out}. Where all pieces are:\n{JOIN}")
    return 0


def read_packages(lines: Iterable[str]) -> dict[str, str]:
    """Version by package, "" where a line has only the name."""
    pairs = (line.partition("==") for line in lines if line.strip())
    return {canonical(name.strip()): version.strip().partition("+")[0] for name, _, version in pairs}


def imported_packages() -> dict[str, str]:
    """Versions of the distributions whose modules the sections import, in a process of their own."""
    done = subprocess.run([sys.executable, "-c", _IMPORTED], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    owners = importlib.metadata.packages_distributions()
    names = {owner for module in done.stdout.split() for owner in owners.get(module, ())}
    return {canonical(name): importlib.metadata.version(name) for name in names}


def missing(needed: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """The packages to carry: not of torch, and not there in the same or an unknown version."""
    return {
        name: version
        for name, version in needed.items()
        if not _OF_TORCH.match(name) and there.get(name, None) not in ("", version)
    }


def download(requirements: Sequence[str], python: str, folder: Path) -> None:
    """Download wheels for that Python on x86-64 Linux, without what they require."""
    platforms = [option for platform in _PLATFORMS for option in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python]
    if requirements:
        subprocess.run([*command, *platforms, "-d", str(folder), *requirements], check=True)


def add_transformer_engine(python: Path, version: str, folder: Path) -> None:
    """Compile Transformer Engine's extension for the torch of ``python``, and download the parts that are not compiled."""
    pins = read_pins(["gpu.txt"])
    names = ("transformer-engine", "transformer-engine-cu13", "einops", "nvdlfw-inspect", "onnxscript", "pydantic")
    download([f"{name}=={pins[name]}" for name in names], version, folder)
    environment = {"NVTE_PYTORCH_FORCE_BUILD": "TRUE", "NVTE_BUILD_USE_NVIDIA_WHEELS": "1", "NVTE_CUDA_ARCHS": "90"}
    command = [str(python), "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", str(folder)]
    source = ["--require-hashes", "-r", str(ROOT / "requirements/gpu-build.lock")]
    subprocess.run([*command, *source], env={**environment, **os.environ}, check=True)


def cut(wheels: Path, out: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Write the wheels as one archive in pieces of at most ``piece_bytes``, with ``SHA256SUMS``. Returns the pieces."""
    for old in out.glob("carry.tar.*"):
        old.unlink()
    archive = out / "carry.tar"
    with tarfile.open(archive, "w") as tar:
        for wheel in sorted(wheels.glob("*.whl")):
            tar.add(wheel, f"wheels/{wheel.name}")
    pieces, sums = [], []
    with archive.open("rb") as file:
        while data := file.read(piece_bytes):
            pieces.append(out / f"carry.tar.{len(pieces):03}")
            pieces[-1].write_bytes(data)
            sums.append(f"{hashlib.sha256(data).hexdigest()}  {pieces[-1].name}\n")
    archive.unlink()
    (out / "SHA256SUMS").write_text("".join(sums))
    return pieces


if __name__ == "__main__":
    sys.exit(main())
