"""Probes of files before they are read, and of folders before they are written.

Both raise UserError for the problems that a user can fix, so that a run refuses them before anything starts.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

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
