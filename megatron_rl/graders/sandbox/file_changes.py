"""Notices that the program made, changed or removed a file in the folder that the tests share with it."""

import os
import stat

_LOOKED_AT = 1 << 16
"""Bytes of each file that are compared, besides its size and times: a change may come within one tick of the clock."""
_State = dict[str, tuple[tuple[int, ...], bytes]]


class FileChanges:
    """Context around each request to the program; adds "files" to ``given`` if a file has changed. Requests inside a request
    count with it."""

    def __init__(self, given: set[str]) -> None:
        self._given = given
        self._folder = os.getcwd()
        self._depth = 0
        self._before: _State = {}

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._before = _files(self._folder)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and _files(self._folder) != self._before:
            self._given.add("files")


def _files(root: str) -> _State:
    """Size, time, number and beginning of each file in the folder and its subfolders."""
    found: _State = {}
    for folder, folders, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in (*folders, *names)):
            found[path] = (-1,), b""
            try:
                size = os.stat(path, follow_symlinks=False)
                if stat.S_ISREG(size.st_mode):  # to read from a pipe would be to wait
                    with open(path, "rb") as file:
                        found[path] = (size.st_size, size.st_mtime_ns, size.st_ino), file.read(_LOOKED_AT)
            except OSError:
                pass
    return found
