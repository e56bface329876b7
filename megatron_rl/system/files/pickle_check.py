"""Checks the names that a pickle imports before a library loads it. No code of the pickle runs."""

import pickle
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any


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
