"""Notices that the program made, changed or removed a file in the folder that the tests share with it."""

import os
import shutil
import stat
import time
from contextlib import suppress

_LOOKED_AT = 1 << 16
"""Bytes of each file that are compared, besides its size and times: a change may come within one tick of the clock."""
_TICK_NS = 20_000_000
"""Within this time two changes of a folder may have the same time."""
_State = dict[str, tuple[tuple[int, ...], bytes]]


class FileChanges:
    """Context around each request to the program; adds "files" to ``given`` if a file has changed. Requests inside a request
    count with it.

    Args:
        undoes: What has changed becomes as it was before the request.
    """

    def __init__(self, given: set[str], *, undoes: bool = False) -> None:
        self._given, self._size = given, -1 if undoes else _LOOKED_AT
        self._folder = os.getcwd()
        self._depth = 0
        self._before: _State = {}
        self._empty_at = 0
        """When the folder was last changed, if it was empty then."""

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._before = self._state()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and (after := self._state()) != self._before:
            self._given.add("files")
            if self._size < 0:
                _undo(after, self._before)

    def _state(self) -> _State:
        changed_at = os.stat(self._folder).st_mtime_ns
        if changed_at == self._empty_at:
            return {}
        found = _files(self._folder, self._size)
        is_past = time.time_ns() - changed_at > _TICK_NS
        self._empty_at = changed_at if is_past and not found else 0
        return found


def _files(root: str, size: int) -> _State:
    """Size, time, number and the first ``size`` bytes (-1: all) of each file in the folder and its subfolders."""
    found: _State = {}
    for folder, folders, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in (*folders, *names)):
            found[path] = (-1,), b""
            try:
                about = os.stat(path, follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):  # to read from a pipe would be to wait
                    with open(path, "rb") as file:
                        found[path] = (about.st_size, about.st_mtime_ns, about.st_ino), file.read(size)
            except OSError:
                pass
    return found


def _undo(after: _State, before: _State) -> None:
    for path in after.keys() - before.keys():
        with suppress(OSError):
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
    for path, (about, content) in before.items():  # a folder comes before what is in it
        with suppress(OSError):
            if about == (-1,):
                os.makedirs(path, exist_ok=True)
            elif after.get(path) != (about, content):
                with open(path, "wb") as file:
                    file.write(content)
