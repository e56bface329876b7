"""Prepares Megatron Core for a machine without a GPU at its first import, by whomever. Imports neither torch nor Megatron.

``megatron_rl`` installs it when it is imported itself, so no module has to be imported before another.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

from megatron_rl.cpu import transformers_imports

PACKAGE = "megatron.core"


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
        if fullname in transformers_imports.MISSED:
            return transformers_imports.find_spec(fullname, path, target)
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        from megatron_rl.cpu import megatron

        return megatron.find_spec(fullname, path, target, is_first=fullname == PACKAGE)
