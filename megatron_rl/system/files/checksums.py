"""Sizes and SHA-256 of files, to tell a damaged one by name."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Checksums = dict[str, tuple[int, str]]
"""File, relative to its folder -> (bytes, SHA-256 in hex)."""
_NUM_THREADS = 4


def checksums(folder: Path, names: Iterable[str]) -> Checksums:
    """Of some files of ``folder``, several at a time. Raises OSError."""
    names = list(names)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:  # hashing and reading leave Python's lock alone
        return dict(zip(names, threads.map(lambda name: _checksum(folder / name), names), strict=True))


def damaged(folder: Path, expected: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """One message for every file that is not as ``expected``; only whose size is right is read."""
    right_size = []
    for name, (size, _) in expected.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            yield f"{folder / name} is missing or cannot be read ({error.strerror})"
            continue
        if found != size:
            yield f"{folder / name} has {found} bytes instead of {size}"
        else:
            right_size.append(name)
    try:
        found_sums = checksums(folder, right_size)
    except OSError as error:
        yield f"{error.filename} cannot be read ({error.strerror})"
        return
    yield from (
        f"{folder / name} has another content than was written (its SHA-256 differs)"
        for name, checksum in found_sums.items()
        if checksum != tuple(expected[name])
    )


def parse_checksums(content: Any) -> Checksums:
    """What JSON makes of ``Checksums``. ValueError where it is none, or names a file outside its folder."""
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
