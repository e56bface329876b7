"""Compilation by numba with a cache on disk, so that a process compiles only loops that no earlier process has compiled.

The cache is in ``__pycache__`` of the loop's folder, or in the user's cache folder if that one is read-only. Invariants: an entry
belongs to one numba, one Python, one processor and one content of the loop's source files; processes that compile at the same
time cannot mix up their entries.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def compiled_with_cache(function: Callable[..., Any], sources: tuple[Path, ...], **options: Any) -> Any:
    """``numba.njit(function, **options)`` with a cache; without the cache if no folder for it is writable.

    ``sources``: the files of ``function`` and of all functions that are compiled into it, of which numba itself checks
    only the first one's age.
    """
    import numba  # takes a third of a second, which importing this module need not

    try:
        loop = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no locator: neither the function's folder nor the user's cache folder is writable
        return numba.njit(**options)(function)
    numbas = loop._cache._cache_file
    loop._cache._cache_file = _cache_file()(numbas._cache_path, numbas._index_name.removesuffix(".nbi"), _digest(sources))
    return loop


@cache
def _digest(sources: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


@cache
def _cache_file() -> Any:
    from numba.core.caching import IndexDataCacheFile

    class CacheFile(IndexDataCacheFile):
        """Names an entry by its key: numba numbers entries, and two processes could give one number to different entries."""

        def save(self, key: Any, data: Any) -> None:
            name = f"{self._index_name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"
            self._save_data(name, data)
            self._save_index(self._load_index() | {key: name})

        def _load_index(self) -> dict[Any, str]:
            try:
                return dict(super()._load_index())
            except AttributeError:  # an older version of the package wrote the index, with a type that no longer exists
                return {}

    return CacheFile
