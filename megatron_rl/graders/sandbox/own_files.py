"""Notices that the program changed or removed a file of the tests, which share its folder."""

import os
import stat

_LOOKED_AT = 1 << 16
"""Bytes of each file that are compared, besides its size."""


class OwnFiles:
    """Context around each request to the program; adds "changes" to ``given`` if a file that the tests wrote has changed.

    A file that the program made is its own to change, and requests inside a request change nothing here.
    """

    def __init__(self, given: set[str]) -> None:
        self._given = given
        self._depth = 0
        self._own: set[str] = set()
        self._now: dict[str, tuple[int, bytes]] = {}

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:  # what has changed since the last request, the tests have written
            last, self._now = self._now, _files()
            self._own |= {name for name, content in self._now.items() if last.get(name) != content}

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            last, self._now = self._now, _files()
            if any(self._now.get(name) != last[name] for name in self._own & last.keys()):
                self._given.add("changes")


def _files() -> dict[str, tuple[int, bytes]]:
    """Size and beginning of each file in the folder."""
    found: dict[str, tuple[int, bytes]] = {}
    for name in os.listdir():
        try:
            size = os.stat(name, follow_symlinks=False)
            if stat.S_ISREG(size.st_mode):  # to read from a pipe would be to wait
                with open(name, "rb") as file:
                    found[name] = size.st_size, file.read(_LOOKED_AT)
        except OSError:
            found[name] = -1, b""
    return found
