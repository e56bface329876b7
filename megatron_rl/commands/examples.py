"""`megatron-rl examples DIR`: write the examples, recipes and launch scripts of this version into a folder.

A wheel has no repository around it. The folder gets a link `.venv` to the environment of this program, so that
`bash launch/torchrun.sh train --config ...` and `bash launch/quickstart.sh` run in it; `launch/setup.sh` completes the environment.
"""

import argparse
import shutil
import sys
from pathlib import Path

from megatron_rl.errors import UserError

_FOLDERS = ("examples", "launch", "requirements")
_SCRIPT = "tools/prepare_data.py"
_SHARE = "share/megatron_rl"
"""Folder of these files in an environment (setup.py)."""
_IGNORED = shutil.ignore_patterns("__pycache__", "outputs", "test.sh", "te_python.sh")  # the tests are not here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write; it must not exist, or be empty")


def run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; name a new one")
    source = _source()
    for name in _FOLDERS:
        shutil.copytree(source / name, folder / name, ignore=_IGNORED)
    (folder / _SCRIPT).parent.mkdir()
    shutil.copy(source / _SCRIPT, folder / _SCRIPT)
    (folder / ".venv").symlink_to(sys.prefix)
    print(f"wrote {', '.join([*_FOLDERS, _SCRIPT])} and a link to this environment into {folder}")
    return 0


def _source() -> Path:
    """Folder that contains ``launch`` and ``examples``: the checkout of this package, or the wheel's data folder.

    Raises UserError if the wheel was installed without them.
    """
    checkout = Path(__file__).parents[2]
    if (checkout / "launch" / "setup.sh").is_file():
        return checkout
    from importlib.metadata import PackageNotFoundError, files

    try:
        installed = next((file for file in files("megatron_rl") or () if f"{_SHARE}/launch/setup.sh" in str(file)), None)
    except PackageNotFoundError:
        installed = None
    if installed is None:
        raise UserError("the examples are not installed with this package: pip install --force-reinstall megatron_rl")
    return Path(str(installed.locate())).parents[1]
