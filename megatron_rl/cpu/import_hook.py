"""Prepares Megatron Core for a machine without a GPU at its first import, from any module. Imports neither torch nor Megatron.

Importing ``megatron_rl`` installs the hook, so no module has to be imported before another.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

from megatron_rl.cpu import transformers_imports

PACKAGE = "megatron.core"


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
        if fullname in transformers_imports.MISSED:
            return transformers_imports.find_spec(fullname, path, target)
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        from megatron_rl.cpu import megatron

        return megatron.find_spec(fullname, path, target, is_first=fullname == PACKAGE)
