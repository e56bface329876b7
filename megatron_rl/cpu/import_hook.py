"""Prepares Megatron Core for a machine without a GPU at its first import, from any module. Imports neither torch nor Megatron.

Importing ``megatron_rl`` installs the hook, so no module has to be imported before another.

transformers imports two libraries for functions that are never called here, together 1.3 s in every process; the hook reports
these libraries as missing. Two modules of Megatron import wandb, which makes temporary folders that a killed process leaves;
the hook hides wandb from them.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

PACKAGE = "megatron.core"
_MISSED = {
    "transformers.generation.candidate_generator": "is_sklearn_available",
    "transformers.loss.loss_for_object_detection": "is_scipy_available",
}
"""Maps a module to the function that reports its library. Without it, only assisted generation and detection losses fail."""
_LOGGING = (
    f"{PACKAGE}.timers",
    f"{PACKAGE}.inference.engines.dynamic_engine",
    f"{PACKAGE}.inference.contexts.dynamic_context",
)
"""Modules that import wandb for functions that are never called here."""


def install() -> None:
    """Install the hook; a second call does nothing. Raises ImportError on a CPU if ``megatron.core`` is already imported."""
    if any(isinstance(finder, _FirstImport) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        import torch  # Megatron has imported torch already

        if not torch.cuda.is_available():
            raise ImportError(f"{PACKAGE} was imported before megatron_rl; without a GPU, import megatron_rl first")
    sys.meta_path.insert(0, _FirstImport())


class _FirstImport:
    """Import finder: adapts Megatron Core to a CPU and hides libraries from two modules of transformers; ignores other imports."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _MISSED:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            return _importing_inside(spec, lambda: _without_library(_MISSED[fullname]))
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        from megatron_rl.cpu import megatron

        spec = megatron.find_spec(fullname, path, target, is_first=fullname == PACKAGE)
        if fullname in _LOGGING:
            spec = spec or importlib.machinery.PathFinder.find_spec(fullname, path, target)
            return _importing_inside(spec, _without_wandb)
        return spec


def _importing_inside(
    spec: importlib.machinery.ModuleSpec | None, block: Callable[[], AbstractContextManager[None]]
) -> importlib.machinery.ModuleSpec | None:
    """Make the module of ``spec`` run inside ``block()`` when it is imported."""
    if spec is None or spec.loader is None:
        return spec
    run_module = spec.loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        with block():
            run_module(module)

    loader: Any = spec.loader
    loader.exec_module = exec_module
    return spec


@contextmanager
def _without_library(question: str) -> Iterator[None]:
    """Let transformers' function ``question`` report that its library is not installed."""
    import transformers.utils as utils

    real = getattr(utils, question)
    setattr(utils, question, lambda: False)
    try:
        yield
    finally:
        setattr(utils, question, real)


@contextmanager
def _without_wandb() -> Iterator[None]:
    is_imported = "wandb" in sys.modules
    if not is_imported:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not is_imported:
            del sys.modules["wandb"]
