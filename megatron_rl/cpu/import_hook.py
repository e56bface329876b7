"""Prepares Megatron Core for a machine without a GPU at its first import, by whomever. Imports neither torch nor Megatron.

``megatron_rl`` installs it when it is imported itself, so no module has to be imported before another.

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
"""Module -> whom it asks for the library: assisted generation goes without it, the loss of object detection fails."""


def install() -> None:
    """Calling it again changes nothing. Raises ImportError on a CPU where ``megatron.core`` was imported before."""
    if any(isinstance(finder, _FirstImport) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        import torch  # Megatron imports it anyway

        if not torch.cuda.is_available():
            raise ImportError(f"{PACKAGE} was imported before megatron_rl; without a GPU, import megatron_rl first")
    sys.meta_path.insert(0, _FirstImport())


class _FirstImport(importlib.abc.MetaPathFinder):
    """Asked for every module; answers for those of Megatron Core, on a CPU alone, and two of transformers."""

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
    """Of a module in ``_MISSED``, which is told while it is imported that its library is not installed."""
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
