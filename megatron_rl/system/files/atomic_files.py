"""Atomic files and folders, whose content is always complete and on disk; sizes and SHA-256 of files, to detect damaged ones."""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil

from megatron_rl.errors import UserError

_TEMPORARY = "megatron_rl-"
"""Beginning of a temporary folder's name; purpose, process id and random characters follow."""
Checksums = dict[str, tuple[int, str]]
"""Maps file name, relative to its folder, to (bytes, SHA-256 in hex)."""
_NUM_THREADS = 4


@contextmanager
def atomic_text_file(path: str | Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file that gets its name if the block ends without an error; creates the folder. Raises OSError."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        # Each writer has its own temporary name, because a report's thread and the final report may write at the same time.
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    except OSError as error:
        raise OSError(error.errno, f"cannot be written ({error.strerror})", str(path)) from error
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
    """Replace a file atomically: a reader sees either the old or the new content. Raises OSError."""
    with atomic_text_file(path) as file:
        if isinstance(content, str):
            file.write(content)
        else:
            file.buffer.write(content)
    return Path(path)


def lock_file(file: TextIO, path: Path) -> None:
    """Lock ``file`` for this process while it is open. Raises UserError if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"run.output_dir: another run is writing to {path} right now; give another folder") from error


def is_locked(path: Path) -> bool:
    """True if another process has locked the file; False if the file does not exist. Raises OSError."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError) as error:
        return isinstance(error, BlockingIOError)
    return False


def replace_folder(partial: Path, folder: Path) -> None:
    """Rename ``partial`` to ``folder``; an existing ``folder`` is removed afterwards. Raises OSError."""
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Create a temporary folder next to ``target`` that gets its name if the block succeeds and is removed otherwise.

    Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp creates private folders
        replace_folder(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(parent: Path, pattern: str) -> None:
    """Remove folders left by processes killed inside ``atomic_folder``; the caller must know that no such process is running."""
    for folder in parent.glob(f".{pattern}.{'[a-z0-9_]' * 8}"):  # the name pattern of mkdtemp
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


class TemporaryFolder:
    """A folder that another process removes when this process calls ``remove`` or ends, even by SIGKILL.

    ``also``: shell commands before that; $1 is the folder. Folders whose remover was killed too are removed by later ones.
    """

    def __init__(self, purpose: str, also: str = ":") -> None:
        remove_abandoned_folders()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{purpose}-{os.getpid()}-"))
        # Twice, because processes that end at the same time may still write.
        script = f'read _; {also}; rm -rf -- "$1" || {{ sleep 1; rm -rf -- "$1"; }}'
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", str(self.path)],
            cwd="/", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def remove(self) -> None:
        self._remover.communicate()  # closes its standard input


def remove_abandoned_folders() -> None:
    """Remove the temporary folders of processes that were killed together with their removers."""
    for left in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*-*-*"):
        pid = left.name.removeprefix(_TEMPORARY).split("-")[1]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def checksums(folder: Path, names: Iterable[str]) -> Checksums:
    """Checksums of some files of ``folder``, computed in parallel. Raises OSError."""
    names = list(names)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:  # hashing and reading release the GIL
        return dict(zip(names, threads.map(lambda name: _checksum(folder / name), names), strict=True))


def damaged(folder: Path, expected: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """Yield one message per file that differs from ``expected``; only files of the right size are read."""
    right_size = []
    for name, (size, _) in expected.items():
        try:
            num_bytes = (folder / name).stat().st_size
        except OSError as error:
            yield f"{folder / name} is missing or cannot be read ({error.strerror})"
            continue
        if num_bytes != size:
            yield f"{folder / name} has {num_bytes} bytes instead of {size}"
        else:
            right_size.append(name)
    try:
        found_sums = checksums(folder, right_size)
    except OSError as error:
        yield f"{error.filename} cannot be read ({error.strerror})"
        return
    yield from (
        f"{folder / name} differs from the content that was written (its SHA-256 differs)"
        for name, checksum in found_sums.items()
        if checksum != tuple(expected[name])
    )


def parse_checksums(content: Any) -> Checksums:
    """Parse the JSON of ``Checksums``. Raises ValueError for other content, or for a file outside its folder."""
    if not isinstance(content, dict):
        raise ValueError("expected a mapping of file names")
    parsed: Checksums = {}
    for name, entry in content.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name!r} is not a file in its folder")
        match entry:
            case [int(size), str(digest)]:
                parsed[name] = (size, digest)
            case _:
                raise ValueError(f"{name!r}: expected [bytes, SHA-256]")
    return parsed


def _checksum(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest
