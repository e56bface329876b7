"""Prepares Megatron Core for a machine without a GPU at its first import, from any module. Imports neither torch nor Megatron.

Importing ``megatron_rl`` installs the hook, so no module has to be imported before another.

transformers imports two libraries for what nobody calls here, together 1.3 s in every process: it is told that they are missing.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGE = "megatron.core"
_MISSED = {
    "transformers.generation.candidate_generator": "is_sklearn_available",
    "transformers.loss.loss_for_object_detection": "is_scipy_available",
}
"""Maps a module to the function that reports its library. Without it, only assisted generation and detection losses fail."""


def install() -> None:
    """Install the hook; a second call does nothing. Raises ImportError on a CPU if ``megatron.core`` is already imported."""
    if any(isinstance(finder, _FirstImport) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        import torch  # Megatron has imported torch already

        if not torch.cuda.is_available():
            raise ImportError(f"{PACKAGE} was imported before megatron_rl; without a GPU, import megatron_rl first")
    sys.meta_path.insert(0, _FirstImport())


class _FirstImport(importlib.abc.MetaPathFinder):
    """Handles modules of Megatron Core (on a CPU only) and two modules of transformers; ignores all other imports."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _MISSED:
            return _find_without_library(fullname, path, target)
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        from megatron_rl.cpu import megatron

        return megatron.find_spec(fullname, path, target, is_first=fullname == PACKAGE)


def _find_without_library(
    fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
) -> importlib.machinery.ModuleSpec | None:
    """Find a module in ``_MISSED`` that sees, while it is imported, that its library is not installed."""
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is None or spec.loader is None:
        return spec
    run_module = spec.loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        import transformers.utils as utils

        question = _MISSED[fullname]
        real = getattr(utils, question)
        setattr(utils, question, lambda: False)
        try:
            run_module(module)
        finally:
            setattr(utils, question, real)

    loader: Any = spec.loader
    loader.exec_module = exec_module
    return spec
