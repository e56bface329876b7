"""Sizes and SHA-256 of files, to detect and report damaged files."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Checksums = dict[str, tuple[int, str]]
"""Maps file name, relative to its folder, to (bytes, SHA-256 in hex)."""
_NUM_THREADS = 4


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
