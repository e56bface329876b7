"""Probes of files before they are read, and of folders before they are written; names that a pickle imports.

Problems that a user can fix raise UserError, so that a run refuses them before anything starts. A pickle's names are
checked before a library loads it; no code of the pickle runs.
"""

import contextlib
import os
import pickle
import re
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

SMALL_FILE_BYTES = 2**26
"""Largest configuration file: 64 MiB."""
_PROBE_BYTES = 2**20


def read_regular(path: str | Path, max_bytes: int = SMALL_FILE_BYTES) -> bytes:
    """Read a whole file. Raises UserError for a device, a pipe, or more than ``max_bytes``, and OSError."""
    # Without O_NONBLOCK the opening of a pipe would wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path} is a device or a pipe; expected a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(f"{path} has more than {max_bytes:,} bytes; expected a smaller file")
    return content


def probe_folder(key: str, folder: str | Path) -> None:
    """Make ``folder`` and write a file into it, then remove both, except for what was there before.

    Raises UserError, which names ``key``, if the folder cannot be made or written.
    """
    folder = Path(folder)
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        done = "written to" if folder.is_dir() else "made"
        raise UserError(f"{key}: {folder} cannot be {done} ({error.strerror or error}); give a folder on a disk with space") from error
    finally:
        # Only empty folders: another run may have written into one of them meanwhile.
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()


class UnsafePickle(ValueError):
    """The file is not a pickle, is damaged, or imports a name that is not allowed."""


def check_pickle(path: Path, allowed: Collection[str], enums: Collection[str] = ()) -> None:
    """Raise UnsafePickle unless the file is a complete pickle that imports only ``allowed`` names (as module.name).

    ``enums``: allowed enumerations whose members may be looked up by name with ``getattr``, as Python 3.11.0 to 3.11.3
    write them.
    """
    try:
        with open(path, "rb") as file:
            _Reader(file, allowed, enums).load()
    except OSError as error:
        raise UnsafePickle(f"{path} cannot be read ({error.strerror})") from error
    except UnsafePickle as error:
        raise UnsafePickle(f"{path} {error}") from None
    # A pickle is a program for a small virtual machine, so a damaged one may raise anything or exhaust memory.
    except (Exception, MemoryError) as error:
        raise UnsafePickle(f"{path} is damaged: {type(error).__name__}: {error}") from error


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any, allowed: Collection[str], enums: Collection[str]) -> None:
        super().__init__(file)
        self._allowed, self._enums = allowed, enums

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name == "builtins.getattr" and self._enums:
            return _member
        if full_name not in self._allowed:
            raise UnsafePickle(f"wants to import {full_name}, which no checkpoint needs; it was not loaded")
        return _InertEnum if full_name in self._enums else _Inert


def _member(owner: object, name: object) -> object:
    """Replaces ``getattr``: looks up only members of enumerations, which cannot be called."""
    if owner is not _InertEnum or not isinstance(name, str) or not re.fullmatch("[A-Z][A-Z0-9_]*", name):
        raise UnsafePickle(
            f"wants the attribute {name!r} of an object that is not an enum, which no checkpoint needs; it was not loaded"
        )
    return object()


class _Inert:
    """Replaces every class and function: accepts any arguments and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Inert":
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _InertEnum(_Inert):
    pass
