"""Stands in for torch where torch is not installed, such as a login node, for commands that compute nothing with it.

The files of losses and of model families import torch at their top. A plan or a simulation reads their names, signatures
and sizes alone, so a module is enough whose attributes serve as annotations and decorators, and fail when they are called.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_PACKAGE = "torch"


def install() -> None:
    """Install the placeholder, unless torch is installed or imported. For a process of the command line only."""
    if _PACKAGE not in sys.modules and importlib.util.find_spec(_PACKAGE) is None:
        sys.meta_path.append(_Finder())


class _Finder:
    """Finds torch and its modules; comes last, so that whatever is installed is found first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """A placeholder has nothing to execute."""


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "no_grad":
            return lambda: _unchanged
        return type(name, (_Missing,), {"__module__": self.__name__})


class _Missing:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise ModuleNotFoundError(f"No module named {_PACKAGE!r}", name=_PACKAGE)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
