"""The folder that programs write to, where it is not a file system of its own: measured, emptied and removed.

Invariant: whatever a program left there (names, depth, permissions, links), nothing outside of the folder is touched,
and emptying it succeeds.
"""

import glob
import os
import secrets
import stat
import sys
import tempfile

MAX_ENTRIES = 4096
"""Files and folders of a program."""
_MAX_PATH_CHARS = 1024
_MIN_MEMORY_FOLDER_BYTES = 256 << 20
_PREFIX = "megatron_rl_sandbox_"


def make_folder() -> str:
    """An empty folder of this process. Those of processes that were killed are removed first."""
    _remove_leftovers()
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_", dir=_fast_folder())


def folder_bytes(folder: str) -> int:
    """What is in a folder; more than any limit if it has too many entries, or paths too long, to be looked through."""
    num_bytes, num_entries, waiting = 0, 0, [folder]
    while waiting:
        path = waiting.pop()
        if len(path) > _MAX_PATH_CHARS:
            return sys.maxsize
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries > MAX_ENTRIES:
                        return sys.maxsize
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            pass  # deleted meanwhile
        except PermissionError:
            pass  # it holds what the program put there before, and can add nothing
        except OSError:
            return sys.maxsize
    return num_bytes


def empty_folder(folder: str) -> None:
    """Delete what is in a folder, whatever its permissions and however deep it is: by bringing folders up, not by going
    down."""
    prefix, number = f"{folder}/{secrets.token_hex(8)}", 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, stat.S_IRWXU)
            for child in list(os.scandir(entry.path)):
                if child.is_dir(follow_symlinks=False):
                    os.chmod(child.path, stat.S_IRWXU)
                    os.rename(child.path, f"{prefix}{number}")
                    number += 1
                else:
                    os.unlink(child.path)
            os.rmdir(entry.path)


def _fast_folder() -> str:
    """Where programs write: memory, if there is enough of it, else the temporary folder (TMPDIR)."""
    memory = "/dev/shm"
    if os.access(memory, os.W_OK):
        about = os.statvfs(memory)
        if about.f_bavail * about.f_frsize > _MIN_MEMORY_FOLDER_BYTES:
            return memory
    return tempfile.gettempdir()


def _remove_leftovers() -> None:
    """Folders of supervisors that were killed."""
    for path in glob.glob(f"{_fast_folder()}/{_PREFIX}*"):
        pid = path.rpartition(_PREFIX)[2].partition("_")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and os.stat(path).st_uid == os.geteuid():
            empty_folder(path)
            os.rmdir(path)
