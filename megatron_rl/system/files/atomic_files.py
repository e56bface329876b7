"""Files and folders that appear whole or not at all: what takes their name is complete and on disk."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psutil

from megatron_rl.errors import UserError


@contextmanager
def atomic_text_file(path: str | Path) -> Iterator[TextIO]:
    """A UTF-8 text file that takes its name when the block ends without an error; makes the folder. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each writer: a report's thread and the final report may be written at the same time.
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(partial, 0o666 & ~umask)  # temporary files are private by default
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def write_atomic(path: str | Path, content: str | bytes) -> Path:
    """Replace a file in one move: a reader sees the old content or the new, never a part. Raises OSError."""
    with atomic_text_file(path) as file:
        if isinstance(content, str):
            file.write(content)
        else:
            file.buffer.write(content)
    return Path(path)


def lock_file(file: TextIO, path: Path) -> None:
    """Lock ``file`` for this process, as long as it is open. UserError where another one writes to ``path``."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"run.output_dir: another run is writing to {path} right now; give another folder") from error


def is_locked(path: Path) -> bool:
    """Whether another process holds the file; one that is not there nobody does. Raises OSError."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError) as error:
        return isinstance(error, BlockingIOError)
    return False


def replace_folder(partial: Path, folder: Path) -> None:
    """``partial`` takes the name ``folder``; a folder that has it already is removed after that. Raises OSError."""
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder next to ``target`` that takes its name when the block succeeds, else vanishes. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp's own mode shuts everyone else out
        replace_folder(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(parent: Path, pattern: str) -> None:
    """What processes killed inside ``appearing`` have left of targets of such names. For a caller who knows that none lives."""
    for folder in parent.glob(f".{pattern}.{'[a-z0-9_]' * 8}"):  # as mkdtemp names them
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def new_temporary_folder(purpose: str) -> Path:
    """For the caller to remove. Those that killed processes left behind for the same ``purpose`` are removed now."""
    prefix = f"megatron_rl-{purpose}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
